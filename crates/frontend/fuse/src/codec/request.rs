//! Requests from the kernel.

use forkdisk::Buf;

use super::attr::SetAttr;
use super::fields::Fields;
use super::init::InitRequest;

/// Bytes in front of a write's data: the header and the write's fields. Every request is received
/// in two parts, these bytes and the rest, so that the data is page-aligned.
pub const HEAD: usize = HEADER + 40;
const HEADER: usize = 40;
/// Most bytes of one read or write.
pub const MAX_WRITE: usize = 1 << 20;

/// Flags of a read.
pub mod read_flags {
    /// The request names the caller's open files: it is a direct read. Those of the page cache have no owner.
    pub const HAS_OWNER: u32 = 1 << 1;
}

/// Flags of a write.
pub mod write_flags {
    /// The kernel writes back what it has cached.
    pub const FROM_CACHE: u32 = 1 << 0;
    /// As [`read_flags::HAS_OWNER`](super::read_flags::HAS_OWNER): a direct write.
    pub const HAS_OWNER: u32 = 1 << 1;
    /// Clear the set-user-id and set-group-id bits.
    pub const DROP_PRIVILEGES: u32 = 1 << 2;
}

/// The header of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Id that the reply repeats.
    pub unique: u64,
    /// Node of the request.
    pub node: u64,
    /// User of the calling process.
    pub uid: u32,
    /// Group of the calling process.
    pub gid: u32,
    /// Thread id of the caller; 0 for requests of the kernel itself.
    pub pid: u32,
    /// The request was sent before, to a process that has not answered it.
    pub resent: bool,
}

impl Header {
    /// Returns the id of the request, which is the same when it is sent again.
    pub fn request(&self) -> u64 {
        self.unique & !RESENT
    }
}

/// A request.
#[derive(Debug)]
pub struct Request {
    /// Caller and node.
    pub header: Header,
    /// Operation and its arguments.
    pub operation: Operation,
}

/// Operations of the protocol. `handle` is the result of an open.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names are those of the system calls")]
pub enum Operation {
    Init(InitRequest),
    Lookup {
        name: String,
    },
    /// The kernel drops references to nodes: (node, count). No reply.
    Forget(Vec<(u64, u64)>),
    GetAttr {
        handle: Option<u64>,
    },
    SetAttr(SetAttr),
    /// Creates a file, folder or other object, according to the type bits of `mode`.
    MakeNode {
        name: String,
        mode: u32,
    },
    MakeFolder {
        name: String,
        mode: u32,
    },
    /// Creates a symbolic link.
    MakeLink {
        name: String,
        target: Vec<u8>,
    },
    /// Reads the target of a symbolic link.
    ReadLink,
    /// Opens a new file without a name in a folder.
    CreateUnnamed {
        mode: u32,
        flags: u32,
    },
    /// Gives a file without a name its name; of any other it would be a further name.
    Link {
        node: u64,
        name: String,
    },
    Unlink {
        name: String,
    },
    RemoveFolder {
        name: String,
    },
    Rename {
        name: String,
        folder: u64,
        new_name: String,
        flags: u32,
    },
    Open {
        flags: u32,
    },
    Create {
        name: String,
        mode: u32,
        flags: u32,
    },
    /// Reads `buf.len()` bytes, or up to the end of the file.
    Read {
        handle: u64,
        offset: u64,
        flags: u32,
        buf: Buf,
    },
    Write {
        handle: u64,
        offset: u64,
        flags: u32,
        data: Buf,
    },
    Release {
        handle: u64,
    },
    Sync {
        handle: u64,
        data_only: bool,
    },
    OpenFolder,
    /// With `plus`, every name is looked up, too.
    ReadFolder {
        handle: u64,
        offset: u64,
        size: u32,
        plus: bool,
    },
    ReleaseFolder {
        handle: u64,
    },
    SyncFolder,
    StatFs,
    SetXattr {
        name: String,
        value: Vec<u8>,
        flags: u32,
    },
    GetXattr {
        name: String,
        size: u32,
    },
    ListXattr {
        size: u32,
    },
    RemoveXattr {
        name: String,
    },
    Allocate {
        handle: u64,
        offset: u64,
        len: u64,
        mode: u32,
    },
    Seek {
        handle: u64,
        offset: u64,
        whence: u32,
    },
    /// `wide`: the reply takes 64 bits.
    CopyRange {
        handle: u64,
        offset: u64,
        to_handle: u64,
        to_offset: u64,
        len: u64,
        wide: bool,
    },
    /// A caller no longer waits for another request. No reply.
    Interrupt,
    Destroy,
    /// Any other operation, by its number.
    Other(u32),
}

/// A decoded message.
pub enum Decoded {
    /// A request, and the buffer that received it unless that is part of the request.
    Request(Request, Option<Buf>),
    /// An invalid request, with the id for its reply.
    Nonsense(u64, Buf),
}

impl Request {
    /// Decodes a request of `len` bytes, the first of which are in `head` and the rest in `body`. A large write keeps
    /// `body`; the data of a small write is copied to a buffer from `take`, which also provides the buffer of a read,
    /// unless `body` has nothing else.
    ///
    /// Returns `None` if the header is incomplete.
    pub fn decode(head: &[u8; HEAD], body: Buf, len: usize, take: impl FnOnce(usize) -> Buf) -> Option<Decoded> {
        let mut r = Fields(&head[..len.min(HEAD)]);
        let (length, opcode) = (r.u32()? as usize, r.u32()?);
        let (unique, node, uid, gid, pid) = (r.u64()?, r.u64()?, r.u32()?, r.u32()?, r.u32()?);
        let header = Header { unique, node, uid, gid, pid, resent: unique & RESENT != 0 };
        r.skip(4)?;
        let nonsense = |body| Some(Decoded::Nonsense(header.unique, body));
        if length != len || len > HEAD + body.len() {
            return nonsense(body);
        }
        let rest = len.saturating_sub(HEAD);
        if opcode == WRITE {
            return match write(&mut r, body, rest, take) {
                Ok((operation, body)) => Some(Decoded::Request(Request { header, operation }, body)),
                Err(body) => nonsense(body),
            };
        }
        let whole;
        let mut fields = r;
        if rest > 0 {
            whole = [&head[HEADER..], &body[..rest]].concat();
            fields = Fields(&whole);
        }
        if opcode == READ {
            return match read(&mut fields, take) {
                Some(operation) => Some(Decoded::Request(Request { header, operation }, Some(body))),
                None => nonsense(body),
            };
        }
        match operation(opcode, &header, &mut fields) {
            Some(operation) => Some(Decoded::Request(Request { header, operation }, Some(body))),
            None => nonsense(body),
        }
    }
}

impl Request {
    /// Decodes a request that arrived in parts: `head` has its header, followed by the operation's own fields, and
    /// `payload` the remaining `rest` bytes. The payload's buffer has the data of a write, and becomes that of a read.
    ///
    /// Returns `None` if the request is invalid.
    pub fn decode_parts(head: &[u8], mut payload: Buf, rest: usize) -> Option<Request> {
        let mut r = Fields(head);
        let (length, opcode) = (r.u32()? as usize, r.u32()?);
        let (unique, node, uid, gid, pid) = (r.u64()?, r.u64()?, r.u32()?, r.u32()?, r.u32()?);
        let header = Header { unique, node, uid, gid, pid, resent: unique & RESENT != 0 };
        let own = length.checked_sub(HEADER + rest)?;
        let own = head.get(HEADER..HEADER + own)?;
        let mut fields = Fields(own);
        let operation = match opcode {
            READ => {
                let (handle, offset, size) = (fields.u64()?, fields.u64()?, fields.u32()? as usize);
                let flags = fields.u32()?;
                if size > payload.capacity() {
                    return None;
                }
                payload.set_len(size);
                Operation::Read { handle, offset, flags, buf: payload }
            }
            WRITE => {
                let (handle, offset, size) = (fields.u64()?, fields.u64()?, fields.u32()? as usize);
                let flags = fields.u32()?;
                if size != rest || size > payload.capacity() {
                    return None;
                }
                payload.set_len(size);
                Operation::Write { handle, offset, flags, data: payload }
            }
            _ => operation(opcode, &header, &mut Fields(&[own, payload.get(..rest)?].concat()))?,
        };
        Some(Request { header, operation })
    }
}

/// Bytes of data up to which a write is copied: that is cheaper than a new receive buffer.
const SMALL: usize = 64 << 10;
/// Mark in the id of a request that is sent again; the reply repeats it.
const RESENT: u64 = 1 << 63;
const READ: u32 = 15;
const WRITE: u32 = 16;

fn read(r: &mut Fields<'_>, take: impl FnOnce(usize) -> Buf) -> Option<Operation> {
    let (handle, offset, size, flags) = (r.u64()?, r.u64()?, r.u32()? as usize, r.u32()?);
    (size <= MAX_WRITE).then(|| Operation::Read { handle, offset, flags, buf: take(size) })
}

fn write(
    r: &mut Fields<'_>,
    mut body: Buf,
    len: usize,
    take: impl FnOnce(usize) -> Buf,
) -> Result<(Operation, Option<Buf>), Buf> {
    let mut fields = || Some((r.u64()?, r.u64()?, r.u32()? as usize, r.u32()?));
    let Some((handle, offset, size, flags)) = fields().filter(|f| f.2 == len) else {
        return Err(body);
    };
    // A buffer that has nothing else is taken along in any case.
    if size <= SMALL && size < body.len() {
        let mut data = take(size);
        data.copy_from_slice(&body[..size]);
        return Ok((Operation::Write { handle, offset, flags, data }, Some(body)));
    }
    body.set_len(size);
    Ok((Operation::Write { handle, offset, flags, data: body }, None))
}

fn operation(opcode: u32, header: &Header, r: &mut Fields<'_>) -> Option<Operation> {
    use Operation::*;
    Some(match opcode {
        1 => Lookup { name: r.name()? },
        2 => Forget(vec![(header.node, r.u64()?)]),
        3 => {
            let flags = r.u32()?;
            r.skip(4)?;
            let handle = r.u64()?;
            GetAttr { handle: (flags & 1 != 0).then_some(handle) }
        }
        4 => SetAttr(super::attr::SetAttr::decode(r)?),
        5 => ReadLink,
        6 => MakeLink { name: r.name()?, target: r.text()?.to_vec() },
        8 => {
            let mode = r.u32()?;
            r.skip(12)?;
            MakeNode { mode, name: r.name()? }
        }
        9 => {
            let mode = r.u32()?;
            r.skip(4)?;
            MakeFolder { mode, name: r.name()? }
        }
        10 => Unlink { name: r.name()? },
        11 => RemoveFolder { name: r.name()? },
        12 => Rename { folder: r.u64()?, flags: 0, name: r.name()?, new_name: r.name()? },
        13 => Link { node: r.u64()?, name: r.name()? },
        14 => Open { flags: r.u32()? },
        17 => StatFs,
        18 => Release { handle: r.u64()? },
        20 => Sync { handle: r.u64()?, data_only: r.u32()? & 1 != 0 },
        21 => {
            let (size, flags) = (r.u32()? as usize, r.u32()?);
            SetXattr { flags, name: r.attribute()?, value: r.bytes(size)?.to_vec() }
        }
        22 => {
            let size = r.u32()?;
            r.skip(4)?;
            GetXattr { size, name: r.attribute()? }
        }
        23 => ListXattr { size: r.u32()? },
        24 => RemoveXattr { name: r.attribute()? },
        26 => Init(InitRequest::decode(r)?),
        27 => OpenFolder,
        28 | 44 => ReadFolder { handle: r.u64()?, offset: r.u64()?, size: r.u32()?, plus: opcode == 44 },
        29 => ReleaseFolder { handle: r.u64()? },
        30 => SyncFolder,
        35 => {
            let (flags, mode) = (r.u32()?, r.u32()?);
            r.skip(8)?;
            Create { flags, mode, name: r.name()? }
        }
        36 => Interrupt,
        38 => Destroy,
        42 => Forget(forgotten(r)?),
        43 => Allocate { handle: r.u64()?, offset: r.u64()?, len: r.u64()?, mode: r.u32()? },
        45 => {
            let (folder, flags) = (r.u64()?, r.u32()?);
            r.skip(4)?;
            Rename { folder, flags, name: r.name()?, new_name: r.name()? }
        }
        51 => {
            let (flags, mode) = (r.u32()?, r.u32()?);
            CreateUnnamed { flags, mode }
        }
        46 => Seek { handle: r.u64()?, offset: r.u64()?, whence: r.u32()? },
        47 | 53 => {
            let (handle, offset, _node) = (r.u64()?, r.u64()?, r.u64()?);
            let (to_handle, to_offset, len) = (r.u64()?, r.u64()?, r.u64()?);
            CopyRange { handle, offset, to_handle, to_offset, len, wide: opcode == 53 }
        }
        other => Other(other),
    })
}

/// Decodes nodes, each with the number of references to drop.
fn forgotten(r: &mut Fields<'_>) -> Option<Vec<(u64, u64)>> {
    let count = r.u32()? as usize;
    r.skip(4)?;
    // Bounded by the bytes received: a larger count is invalid.
    if count > r.0.len() / 16 {
        return None;
    }
    (0..count).map(|_| Some((r.u64()?, r.u64()?))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::fields::Put;
    use super::*;

    fn received(opcode: u32, rest: &[u8]) -> Option<Decoded> {
        let mut all = Vec::new();
        [(HEADER + rest.len()) as u32, opcode].into_iter().for_each(|v| all.u32(v));
        [77, 5].into_iter().for_each(|v| all.u64(v));
        [1000, 100, 4242, 0].into_iter().for_each(|v| all.u32(v));
        all.extend_from_slice(rest);
        let mut head = [0; HEAD];
        let n = all.len().min(HEAD);
        head[..n].copy_from_slice(&all[..n]);
        let mut body = Buf::zeroed(MAX_WRITE);
        body[..all.len() - n].copy_from_slice(&all[n..]);
        Request::decode(&head, body, all.len(), Buf::zeroed)
    }

    fn operation_of(opcode: u32, rest: &[u8]) -> Option<Operation> {
        match received(opcode, rest)? {
            Decoded::Request(request, _) => {
                assert_eq!(
                    request.header,
                    Header { unique: 77, node: 5, uid: 1000, gid: 100, pid: 4242, resent: false }
                );
                Some(request.operation)
            }
            Decoded::Nonsense(unique, _) => {
                assert_eq!(unique, 77);
                None
            }
        }
    }

    #[test]
    fn names_reach_over_both_parts() {
        let long = "x".repeat(200);
        let Some(Operation::Lookup { name }) = operation_of(1, format!("{long}\0").as_bytes()) else {
            panic!("no lookup")
        };
        assert_eq!(name, long);
        let mut rename = Vec::new();
        rename.u64(9);
        rename.u64(1);
        rename.extend_from_slice(format!("{long}\0b\0").as_bytes());
        let Some(Operation::Rename { name, folder: 9, new_name, flags: 1 }) = operation_of(45, &rename) else {
            panic!("no rename")
        };
        assert_eq!((name, new_name), (long, "b".to_string()));
    }

    fn write_of(len: usize, said: usize) -> Vec<u8> {
        let mut rest = Vec::new();
        [3, 4096].into_iter().for_each(|v| rest.u64(v));
        [said as u32, 0].into_iter().for_each(|v| rest.u32(v));
        rest.resize(40, 0);
        rest.resize(40 + len, 0xaa);
        rest
    }

    #[test]
    fn a_large_write_takes_its_buffer_along_and_a_small_one_does_not() {
        for (len, takes) in [(1, false), (4096, false), (SMALL + 4096, true), (MAX_WRITE, true)] {
            let Some(Decoded::Request(request, body)) = received(WRITE, &write_of(len, len)) else {
                panic!("no write")
            };
            assert_eq!(body.is_none(), takes, "{len}");
            let Operation::Write { handle: 3, offset: 4096, data, .. } = request.operation else { panic!("no write") };
            assert!(data.len() == len && data.iter().all(|&b| b == 0xaa), "{len}");
        }
    }

    /// Returns a request in parts: its header, `own` fields, and a payload of 64 KiB that begins with `rest`.
    fn in_parts(opcode: u32, own: &[u8], rest: &[u8], length: usize) -> Option<Operation> {
        let mut head = Vec::new();
        [length as u32, opcode].into_iter().for_each(|v| head.u32(v));
        [77, 5].into_iter().for_each(|v| head.u64(v));
        [1000, 100, 4242, 0].into_iter().for_each(|v| head.u32(v));
        head.extend_from_slice(own);
        head.resize(HEADER + 128, 0xee);
        let mut payload = Buf::zeroed(64 << 10);
        payload[..rest.len()].copy_from_slice(rest);
        let request = Request::decode_parts(&head, payload, rest.len())?;
        assert_eq!((request.header.unique, request.header.node), (77, 5));
        Some(request.operation)
    }

    #[test]
    fn a_request_in_parts_keeps_its_buffer() {
        let mut own = Vec::new();
        [3, 4096].into_iter().for_each(|v| own.u64(v));
        [100, 4].into_iter().for_each(|v| own.u32(v));
        own.resize(40, 0);
        let Some(Operation::Write { handle: 3, offset: 4096, flags: 4, data }) =
            in_parts(WRITE, &own, &[0xaa; 100], HEADER + 140)
        else {
            panic!("no write")
        };
        assert_eq!((&data[..], data.capacity()), (&[0xaa; 100][..], 64 << 10));
        let Some(Operation::Read { handle: 3, offset: 4096, flags: 4, buf }) = in_parts(READ, &own, &[], HEADER + 40)
        else {
            panic!("no read")
        };
        assert_eq!((buf.len(), buf.capacity()), (100, 64 << 10));
        let Some(Operation::Lookup { name }) = in_parts(1, &[], b"name\0", HEADER + 5) else { panic!("no lookup") };
        assert_eq!(name, "name");
        let mut folder = Vec::new();
        folder.u64(9);
        let Some(Operation::Rename { name, folder: 9, new_name, .. }) = in_parts(12, &folder, b"a\0b\0", HEADER + 12)
        else {
            panic!("no rename")
        };
        assert_eq!((name.as_str(), new_name.as_str()), ("a", "b"));
    }

    #[test]
    fn a_request_in_parts_that_says_too_much_is_refused() {
        let mut own = Vec::new();
        [3, 4096].into_iter().for_each(|v| own.u64(v));
        [(64 << 10) + 1, 0].into_iter().for_each(|v| own.u32(v));
        own.resize(40, 0);
        assert!(in_parts(WRITE, &own, &[0xaa; 100], HEADER + 140).is_none());
        assert!(in_parts(READ, &own, &[], HEADER + 40).is_none());
        assert!(in_parts(1, &[], b"name\0", HEADER + 4).is_none());
        assert!(in_parts(1, &[], b"name\0", HEADER + 200).is_none());
        assert!(in_parts(1, &[], b"no end", HEADER + 6).is_none());
    }

    #[test]
    fn requests_that_are_cut_off_or_say_too_much_are_nonsense() {
        assert!(operation_of(WRITE, &write_of(100, 101)).is_none());
        assert!(operation_of(WRITE, &[0; 20]).is_none());
        assert!(operation_of(1, b"no end").is_none());
        let mut forget = Vec::new();
        [u32::MAX, 0].into_iter().for_each(|v| forget.u32(v));
        assert!(operation_of(42, &forget).is_none());
        for opcode in [2, 3, 4, 8, 9, 12, 14, 15, 18, 20, 21, 22, 23, 26, 28, 29, 35, 43, 45, 46, 47] {
            assert!(operation_of(opcode, &[0; 3]).is_none(), "{opcode}");
        }
        assert!(matches!(operation_of(4000, &[]), Some(Operation::Other(4000))));
    }
}
