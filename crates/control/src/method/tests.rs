//! Tests of requests as JSON.

use serde_json::json;

use super::*;

#[test]
fn a_request_survives_its_way_through_json() {
    let request = Request::from(params::Create {
        volumes: vec!["a".into()],
        size: 1 << 50,
        chunk: None,
        break_policy: None,
        quota: None,
        gather: None,
    });
    let again = Request::from_parts(request.method(), request.params().unwrap()).unwrap();
    assert_eq!(again, request);
}

#[test]
fn optional_parameters_may_be_left_out_and_unknown_ones_are_refused() {
    let parse = |params| Request::from_parts("delete", params);
    let all = params::Delete {
        objects: vec!["a".into()],
        recursive: false,
        dry_run: false,
        count: false,
        until_freed: false,
    };
    assert_eq!(parse(json!({"objects": ["a"]})), Ok(Request::Delete(all)));
    assert!(matches!(parse(json!({"objects": ["a"], "really": true})), Err(Unclear::Params(_))));
    assert!(matches!(parse(json!({})), Err(Unclear::Params(_))));
    assert_eq!(Request::from_parts("dlete", json!({})), Err(Unclear::Method));
}
