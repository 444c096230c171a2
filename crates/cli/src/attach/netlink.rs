//! Generic netlink, as far as the kernel's NBD client needs it: one request, one answer.
//!
//! Messages are native-endian and padded to four bytes. Lengths in the kernel's messages are checked before use.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::netlink::{GENERIC, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send, socket_with};

const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
/// Type of messages that carry the outcome.
const ERROR: u16 = 2;
const REQUEST: u16 = 1;
const ACKNOWLEDGE: u16 = 4;
/// Bit of an attribute that contains attributes.
const NESTED: u16 = 1 << 15;

/// Attributes of a request.
#[derive(Default)]
pub struct Attributes(Vec<u8>);

impl Attributes {
    /// Appends an attribute of `kind`.
    pub fn with(mut self, kind: u16, contents: &[u8]) -> Attributes {
        // Attributes here are names, numbers and short lists of numbers.
        let len = u16::try_from(contents.len() + 4).expect("short contents");
        self.0.extend_from_slice(&len.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(contents);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Appends an attribute that contains other attributes.
    pub fn nested(self, kind: u16, inside: Attributes) -> Attributes {
        self.with(kind | NESTED, &inside.0)
    }

    /// Appends a text, which the kernel requires to end with a zero byte.
    pub fn text(self, kind: u16, text: &str) -> Attributes {
        self.with(kind, &[text.as_bytes(), &[0]].concat())
    }
}

/// A generic netlink family.
pub struct Family {
    socket: OwnedFd,
    id: u16,
}

impl Family {
    /// Finds a family by its name; `NotFound` if the kernel does not have it.
    pub fn find(name: &str) -> io::Result<Family> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(GENERIC))?;
        connect(&socket, &SocketAddrNetlink::new(0, 0))?;
        let controller = Family { socket, id: CONTROL };
        let answer = controller.ask(GET_FAMILY, 1, Attributes::default().text(FAMILY_NAME, name))?;
        let id = find(&answer, FAMILY_ID).and_then(|id| Some(u16::from_ne_bytes(id.get(..2)?.try_into().ok()?)));
        let id = id.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a family without a number"))?;
        Ok(Family { id, ..controller })
    }

    /// Sends a command; returns the attributes of the answer.
    pub fn ask(&self, command: u8, version: u8, attributes: Attributes) -> io::Result<Vec<u8>> {
        let len = 20 + attributes.0.len() as u32;
        let mut message = len.to_ne_bytes().to_vec();
        message.extend_from_slice(&self.id.to_ne_bytes());
        message.extend_from_slice(&(REQUEST | ACKNOWLEDGE).to_ne_bytes());
        message.extend_from_slice(&[0; 8]);
        message.extend_from_slice(&[command, version, 0, 0]);
        message.extend_from_slice(&attributes.0);
        send(&self.socket, &message, SendFlags::empty())?;
        let mut answer = Vec::new();
        let mut buf = vec![0; 64 << 10];
        loop {
            let received = recv(&self.socket, &mut buf[..], RecvFlags::empty())?.0;
            for (kind, body) in messages(&buf[..received]) {
                if kind == ERROR {
                    let code = body.get(..4).map_or(0, |code| i32::from_ne_bytes(code.try_into().expect("four bytes")));
                    return if code == 0 { Ok(answer) } else { Err(io::Error::from_raw_os_error(-code)) };
                }
                answer.extend_from_slice(body.get(4..).unwrap_or_default());
            }
        }
    }
}

/// Splits `bytes` into messages with their types.
fn messages(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while bytes.len() >= 16 {
        let len = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        if len < 16 || len > bytes.len() {
            break;
        }
        found.push((u16::from_ne_bytes([bytes[4], bytes[5]]), &bytes[16..len]));
        bytes = &bytes[len.next_multiple_of(4).min(bytes.len())..];
    }
    found
}

/// Returns the contents of the first attribute of `kind`.
pub fn find(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    while attributes.len() >= 4 {
        let len = usize::from(u16::from_ne_bytes([attributes[0], attributes[1]]));
        if len < 4 || len > attributes.len() {
            return None;
        }
        if u16::from_ne_bytes([attributes[2], attributes[3]]) & !NESTED == kind {
            return Some(&attributes[4..len]);
        }
        attributes = &attributes[len.next_multiple_of(4).min(attributes.len())..];
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_as_they_were_put_together() {
        let inside = Attributes::default().with(1, &7u32.to_ne_bytes());
        let all = Attributes::default().text(10, "pool/a").with(2, &9u64.to_ne_bytes()).nested(7, inside);
        assert_eq!(find(&all.0, 10), Some(&b"pool/a\0"[..]));
        assert_eq!(find(&all.0, 2), Some(&9u64.to_ne_bytes()[..]));
        assert_eq!(find(&all.0, 7).and_then(|inside| find(inside, 1)), Some(&7u32.to_ne_bytes()[..]));
        assert_eq!(find(&all.0, 3), None);
    }

    #[test]
    fn lengths_that_cannot_be_end_the_search() {
        assert_eq!(find(&[255, 255, 1, 0, 0], 1), None);
        assert_eq!(find(&[3, 0, 1, 0, 0], 1), None);
        assert!(messages(&[255; 32]).is_empty() && messages(&[0; 32]).is_empty());
    }

    #[test]
    fn the_kernel_knows_its_own_controller_and_no_family_without_a_name() {
        // A sandbox may not allow netlink at all.
        let Ok(family) = Family::find("nlctrl") else { return };
        assert_eq!(family.id, CONTROL);
        assert!(Family::find("forkdisk-none").is_err());
    }
}
