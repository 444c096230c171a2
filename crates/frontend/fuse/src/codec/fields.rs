//! Reading and writing fields one after the other, in the byte order of the machine, as the kernel has them.

/// Takes fields from the front of a request; every taker answers `None` past the end.
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

    /// Leaves `n` bytes out.
    pub fn skip(&mut self, n: usize) -> Option<()> {
        self.0 = self.0.get(n..)?;
        Some(())
    }

    pub fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    /// A string up to its NUL. What is not UTF-8 in it becomes a character that no name may have.
    pub fn name(&mut self) -> Option<String> {
        let end = self.0.iter().position(|&b| b == 0)?;
        let name = String::from_utf8_lossy(&self.0[..end]).into_owned();
        self.0 = &self.0[end + 1..];
        Some(name)
    }
}

/// Appends fields to a reply.
pub trait Put {
    fn u16(&mut self, v: u16);
    fn u32(&mut self, v: u32);
    fn u64(&mut self, v: u64);
    /// Bytes up to the next multiple of eight.
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
