//! Reading and writing of consecutive fields in native byte order, as the kernel uses.

use forkdisk::escape_name;

/// Reads fields from the front of a request; every method returns `None` past the end.
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    pub fn i64(&mut self) -> Option<i64> {
        self.take().map(i64::from_ne_bytes)
    }

    /// Skips `n` bytes.
    pub fn skip(&mut self, n: usize) -> Option<()> {
        self.0 = self.0.get(n..)?;
        Some(())
    }

    pub fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    /// Reads bytes up to a NUL, which is skipped.
    pub fn text(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|&b| b == 0)?;
        let text = &self.0[..end];
        self.0 = &self.0[end + 1..];
        Some(text)
    }

    /// Reads a file name, and returns it as a part of the name of a volume has it.
    pub fn name(&mut self) -> Option<String> {
        self.text().map(escape_name)
    }

    /// Reads the name of an attribute.
    pub fn attribute(&mut self) -> Option<String> {
        self.text().map(|text| String::from_utf8_lossy(text).into_owned())
    }
}

/// Appends fields to a reply.
pub trait Put {
    fn u16(&mut self, v: u16);
    fn u32(&mut self, v: u32);
    fn u64(&mut self, v: u64);
    /// Pads with zeroes to a multiple of eight bytes.
    fn align(&mut self);
}

impl Put for Vec<u8> {
    fn u16(&mut self, v: u16) {
        self.extend_from_slice(&v.to_ne_bytes());
    }

    fn u32(&mut self, v: u32) {
        self.extend_from_slice(&v.to_ne_bytes());
    }

    fn u64(&mut self, v: u64) {
        self.extend_from_slice(&v.to_ne_bytes());
    }

    fn align(&mut self) {
        self.resize(self.len().next_multiple_of(8), 0);
    }
}
