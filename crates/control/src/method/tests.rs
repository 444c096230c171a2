//! Tests of requests as JSON.

use serde_json::json;

use super::*;

#[test]
fn a_request_survives_its_way_through_json() {
    let request = Request::from(params::Create {
        volumes: vec!["a".into()],
        size: 1 << 50,
        labels: vec!["owner=ci".into()],
        expires: Some(9),
        ..params::Create::default()
    });
    let again = Request::from_parts(request.method(), request.params().unwrap()).unwrap();
    assert_eq!(again, request);
}

#[test]
fn optional_parameters_may_be_left_out_and_unknown_ones_are_refused() {
    let parse = |params| Request::from_parts("delete", params);
    let all = params::Delete { objects: vec!["a".into()], ..params::Delete::default() };
    assert_eq!(parse(json!({"objects": ["a"]})), Ok(Request::Delete(all)));
    assert!(matches!(parse(json!({"objects": ["a"], "really": true})), Err(Unclear::Params(_))));
    assert!(matches!(parse(json!({})), Err(Unclear::Params(_))));
    assert_eq!(Request::from_parts("dlete", json!({})), Err(Unclear::Method));
}
