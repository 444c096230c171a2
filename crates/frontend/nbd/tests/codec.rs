//! The codec alone: round trips, and bytes no client should send.

use forkdisk_nbd::codec::*;
use proptest::collection::vec;
use proptest::prelude::*;

/// Encodes an option as a client does.
fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = IHAVEOPT.to_be_bytes().to_vec();
    bytes.extend_from_slice(&number.to_be_bytes());
    bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn info_data(name: &str, items: &[u16]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(&(items.len() as u16).to_be_bytes());
    items.iter().for_each(|item| data.extend_from_slice(&item.to_be_bytes()));
    data
}

fn encode(message: &Message) -> Vec<u8> {
    match message {
        Message::ExportName(name) => option(OPT_EXPORT_NAME, name.as_bytes()),
        Message::List => option(OPT_LIST, &[]),
        Message::StartTls => option(OPT_STARTTLS, &[]),
        Message::StructuredReply => option(OPT_STRUCTURED_REPLY, &[]),
        Message::ExtendedHeaders => option(OPT_EXTENDED_HEADERS, &[]),
        Message::MetaContext { set, export, queries } => {
            let text = |s: &str| [&(s.len() as u32).to_be_bytes()[..], s.as_bytes()].concat();
            let mut data = [text(export), (queries.len() as u32).to_be_bytes().to_vec()].concat();
            queries.iter().for_each(|query| data.extend(text(query)));
            option(if *set { OPT_SET_META_CONTEXT } else { OPT_LIST_META_CONTEXT }, &data)
        }
        Message::Abort => option(OPT_ABORT, b"bye"),
        Message::Refused { option: number, .. } => option(*number, b"whatever"),
        Message::Info { go, name, requests } => {
            let asked = [
                (requests.name, INFO_NAME),
                (requests.description, INFO_DESCRIPTION),
                (requests.block_size, INFO_BLOCK_SIZE),
            ];
            let items: Vec<u16> = asked.iter().filter(|(on, _)| *on).map(|(_, i)| *i).collect();
            option(if *go { OPT_GO } else { OPT_INFO }, &info_data(name, &items))
        }
    }
}

fn style() -> impl Strategy<Value = ReplyStyle> {
    prop_oneof![Just(ReplyStyle::Simple), Just(ReplyStyle::Structured), Just(ReplyStyle::Extended)]
}

fn message() -> impl Strategy<Value = Message> {
    let name = "[^\\x00]{0,40}";
    let requests =
        any::<[bool; 3]>().prop_map(|[name, description, block_size]| InfoRequests { name, description, block_size });
    prop_oneof![
        name.prop_map(Message::ExportName),
        Just(Message::List),
        Just(Message::StartTls),
        Just(Message::Abort),
        Just(Message::StructuredReply),
        Just(Message::ExtendedHeaders),
        (any::<bool>(), name, vec(name, 0..9)).prop_map(|(set, export, queries)| Message::MetaContext {
            set,
            export,
            queries
        }),
        (any::<bool>(), name, requests).prop_map(|(go, name, requests)| Message::Info { go, name, requests }),
        (12u32..).prop_map(|option| Message::Refused { option, why: Refusal::Unsupported }),
    ]
}

/// Feeds `bytes` in pieces of `step` bytes, through a window as large as a server needs.
fn run(bytes: &[u8], step: usize) -> (Vec<Message>, Result<(), Violation>) {
    let mut handshake = Handshake::new();
    let (mut start, mut end) = (0, 0);
    let mut messages = Vec::new();
    loop {
        let before = start;
        match handshake.advance(&bytes[start..end]) {
            Err(violation) => return (messages, Err(violation)),
            Ok(step) => {
                assert!(step.consumed <= end - start);
                start += step.consumed;
                if let Some(message) = step.message {
                    messages.push(message);
                    continue;
                }
            }
        }
        if end == bytes.len() {
            return (messages, Ok(()));
        }
        let window_is_full = end - start >= MAX_HANDSHAKE_MESSAGE;
        assert!(!window_is_full || start > before, "stuck with all it may look at");
        end = (end + step).min(start + MAX_HANDSHAKE_MESSAGE).min(bytes.len());
    }
}

#[test]
fn the_greeting_is_fixed_newstyle_with_no_zeroes() {
    assert_eq!(GREETING, *b"NBDMAGICIHAVEOPT\0\x03");
}

#[test]
fn golden_client_options() {
    let go = b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x0a\0\0\0\x02vm\0\x01\0\x03";
    let requests = InfoRequests { block_size: true, ..InfoRequests::default() };
    let expected = Message::Info { go: true, name: "vm".to_owned(), requests };
    assert_eq!(run(go, 1), (vec![expected], Ok(())));
    let name = b"\0\0\0\x01IHAVEOPT\0\0\0\x01\0\0\0\x02vm";
    assert_eq!(run(name, 99), (vec![Message::ExportName("vm".to_owned())], Ok(())));
}

#[test]
fn client_flags_that_were_not_offered_are_a_violation() {
    for bit in 2..32 {
        let flags = 1u32 << bit;
        assert_eq!(run(&flags.to_be_bytes(), 4), (vec![], Err(Violation::ClientFlags(flags))));
    }
}

#[test]
fn an_option_with_another_magic_number_is_a_violation() {
    let bytes = [&3u32.to_be_bytes()[..], b"IHAVEOP!"].concat();
    assert!(matches!(run(&bytes, 1).1, Err(Violation::OptionMagic(_))));
}

#[test]
fn names_are_capped_and_must_be_text() {
    let flags = 3u32.to_be_bytes();
    let with = |option: Vec<u8>| run(&[&flags[..], &option].concat(), 512);
    let long = "n".repeat(MAX_NAME + 1);
    let most = &long[1..];
    assert_eq!(with(option(OPT_EXPORT_NAME, long.as_bytes())).1, Err(Violation::ExportName));
    assert_eq!(with(option(OPT_EXPORT_NAME, b"a\xff")).1, Err(Violation::ExportName));
    assert_eq!(with(option(OPT_EXPORT_NAME, b"a\0")).1, Err(Violation::ExportName));
    let (messages, end) = with(option(OPT_EXPORT_NAME, most.as_bytes()));
    assert_eq!((messages, end), (vec![Message::ExportName(most.to_owned())], Ok(())));
    let (messages, _) = with(option(OPT_INFO, &info_data(&long, &[])));
    assert_eq!(messages, [Message::Refused { option: OPT_INFO, why: Refusal::TooBig }]);
}

proptest! {
    #[test]
    fn messages_survive_any_fragmentation(list in vec(message(), 0..6), step in 1usize..80) {
        let mut bytes = 3u32.to_be_bytes().to_vec();
        list.iter().for_each(|m| bytes.extend_from_slice(&encode(m)));
        prop_assert_eq!(run(&bytes, step), (list, Ok(())));
    }

    #[test]
    fn an_option_of_any_length_is_skipped_and_the_next_one_understood(
        number in 12u32.., len in 0usize..40_000, step in 1usize..9_000,
    ) {
        let mut bytes = 3u32.to_be_bytes().to_vec();
        bytes.extend_from_slice(&option(number, &vec![0xa5; len]));
        bytes.extend_from_slice(&option(OPT_LIST, &[]));
        let refused = Message::Refused { option: number, why: Refusal::Unsupported };
        prop_assert_eq!(run(&bytes, step), (vec![refused, Message::List], Ok(())));
    }

    #[test]
    fn requests_round_trip(
        flags: u16, command: u16, cookie: u64, offset: u64, length: u32, tail in vec(any::<u8>(), 0..9),
        style in style(),
    ) {
        let request = Request { style, flags, command, cookie, offset, length: length.into() };
        let header = request.encode();
        let bytes = [&header[..], &tail].concat();
        prop_assert_eq!(Request::decode(&bytes, style), Ok(Some((request, header.len()))));
        for cut in 0..header.len() {
            prop_assert_eq!(Request::decode(&bytes[..cut], style), Ok(None));
        }
    }

    #[test]
    fn an_accepted_request_lies_inside_the_export(
        flags in 0u16..64, command in 0u16..9, offset: u64, length: u64, size: u64, read_only: bool,
        near: bool, style in style(),
    ) {
        let offset = if near { size.wrapping_sub(offset % 70_000) } else { offset };
        let length = if near { length % 70_000 } else { length };
        let request = Request { style, flags, command, cookie: 0, offset, length };
        let (at, len, writes) = match request.check(size, read_only) {
            Ok(Action::Read { offset, len, .. }) => (offset, len.into(), false),
            Ok(Action::Write { offset, len, .. }) => (offset, len.into(), true),
            Ok(Action::Trim { offset, len, .. }) => (offset, len, true),
            Ok(Action::WriteZeroes { offset, len, .. }) => (offset, len, true),
            Ok(Action::Cache { offset, len } | Action::BlockStatus { offset, len, .. }) => (offset, len, false),
            Ok(Action::Flush | Action::Disconnect) | Err(_) => return Ok(()),
        };
        prop_assert_eq!((at, len), (offset, length));
        prop_assert!(u128::from(at) + u128::from(len) <= u128::from(size));
        prop_assert!(!(writes && read_only));
    }

    #[test]
    fn hostile_bytes_never_panic_and_never_make_it_keep_more_than_a_name(
        good_flags: bool,
        list in vec((any::<u32>(), 0u32..13, any::<u32>(), any::<bool>(), vec(any::<u8>(), 0..600)), 0..8),
        tail in vec(any::<u8>(), 0..600), step in 1usize..700,
    ) {
        let mut bytes = if good_flags { vec![0, 0, 0, 3] } else { vec![] };
        for (number, known, len, lies, data) in list {
            let number = if number % 2 == 0 { known } else { number };
            let mut option = option(number, &data);
            if lies {
                option[12..16].copy_from_slice(&len.to_be_bytes());
            }
            bytes.extend_from_slice(&option);
        }
        bytes.extend_from_slice(&tail);
        let (messages, _) = run(&bytes, step);
        for message in messages {
            match message {
                Message::ExportName(name) | Message::Info { name, .. } => prop_assert!(name.len() <= MAX_NAME),
                Message::MetaContext { export, queries, .. } => {
                    prop_assert!(export.len() <= MAX_NAME && queries.len() <= MAX_QUERIES);
                    prop_assert!(queries.iter().map(String::len).sum::<usize>() <= MAX_OPTION_DATA);
                }
                _ => {}
            }
        }
        for at in 0..bytes.len().min(64) {
            if let Ok(Some((request, _))) = Request::decode(&bytes[at..], ReplyStyle::Structured) {
                let _ = request.check(1 << 30, false);
            }
        }
    }

    #[test]
    fn hostile_requests_never_panic(
        mut bytes in vec(any::<u8>(), 0..64), magic: bool, size: u64, style in style(),
    ) {
        if magic && bytes.len() >= 4 {
            let extended = style == ReplyStyle::Extended;
            let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
            bytes[..4].copy_from_slice(&magic.to_be_bytes());
        }
        if let Ok(Some((request, header))) = Request::decode(&bytes, style) {
            prop_assert!(header <= bytes.len());
            prop_assert!(style == ReplyStyle::Extended || request.payload() <= u32::MAX.into());
            let _ = request.check(size, false);
        }
    }
}
