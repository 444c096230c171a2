//! Reading and writing little-endian fields in sequence.

/// Takes fields from the front of a byte string; every method returns `None` past the end.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|b| b[0])
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Returns a string of at most `max` bytes behind its 16-bit length.
    pub fn text(&mut self, max: usize) -> Option<String> {
        let n = usize::from(self.u16()?);
        if n > max {
            return None;
        }
        String::from_utf8(self.bytes(n)?.to_vec()).ok()
    }
}

/// Appends fields to a byte vector.
pub trait Append {
    fn u8(&mut self, v: u8);
    fn u16(&mut self, v: u16);
    fn u32(&mut self, v: u32);
    fn u64(&mut self, v: u64);
    fn u64s(&mut self, all: &[u64]);
    fn text(&mut self, v: &str);
}

impl Append for Vec<u8> {
    fn u8(&mut self, v: u8) {
        self.push(v);
    }

    fn u16(&mut self, v: u16) {
        self.extend_from_slice(&v.to_le_bytes());
    }

    fn u32(&mut self, v: u32) {
        self.extend_from_slice(&v.to_le_bytes());
    }

    fn u64(&mut self, v: u64) {
        self.extend_from_slice(&v.to_le_bytes());
    }

    fn u64s(&mut self, all: &[u64]) {
        all.iter().for_each(|&v| Append::u64(self, v));
    }

    fn text(&mut self, v: &str) {
        Append::u16(self, u16::try_from(v.len()).expect("names are short"));
        self.extend_from_slice(v.as_bytes());
    }
}
