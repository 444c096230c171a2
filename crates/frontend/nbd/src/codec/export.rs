//! What the handshake tells a client about an export.

use super::values::*;

/// An export as its clients see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// The name under which it is listed.
    pub name: String,
    /// A text for people; may be empty.
    pub description: String,
    /// Bytes; any number.
    pub size: u64,
    /// Writes are refused.
    pub read_only: bool,
}

/// Size constraints as NBD_INFO_BLOCK_SIZE tells them, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Unit of offsets and lengths.
    pub minimum: u32,
    /// From this size and alignment on I/O is efficient.
    pub preferred: u32,
    /// Most data in one read or write.
    pub maximum: u32,
}

impl BlockSizes {
    /// What this server works with: the protocol's defaults.
    pub const SERVER: BlockSizes = BlockSizes { minimum: 1, preferred: 4096, maximum: MAX_PAYLOAD };
}

impl ExportInfo {
    /// The transmission flags: what a client may send. A snapshot takes no writes, so it announces
    /// none of their commands.
    pub fn transmission_flags(&self) -> u16 {
        let always = FLAG_HAS_FLAGS | FLAG_SEND_FLUSH | FLAG_SEND_FUA | FLAG_CAN_MULTI_CONN;
        let kind = if self.read_only { FLAG_READ_ONLY } else { FLAG_SEND_TRIM | FLAG_SEND_WRITE_ZEROES };
        always | kind
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writable_export_announces_flush_fua_trim_and_zeroes() {
        let mut info = ExportInfo { name: "a".into(), description: "".into(), size: 1, read_only: false };
        assert_eq!(info.transmission_flags(), 0b1_0110_1101);
        info.read_only = true;
        assert_eq!(info.transmission_flags(), 0b1_0000_1111);
    }
}
