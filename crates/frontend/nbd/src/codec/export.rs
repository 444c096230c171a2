//! Properties of an export that the handshake reports to clients.

use super::reply::ReplyStyle;
use super::values::*;

/// Properties of an export, as clients see them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// The name under which it is listed.
    pub name: String,
    /// A text for people; may be empty.
    pub description: String,
    /// Length in bytes; any number.
    pub size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether a client may open several connections to it.
    pub multi_conn: bool,
}

/// Size constraints as in NBD_INFO_BLOCK_SIZE, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Unit of offsets and lengths.
    pub minimum: u32,
    /// Smallest size and alignment with efficient I/O.
    pub preferred: u32,
    /// Most data in one read or write.
    pub maximum: u32,
}

impl BlockSizes {
    /// The block sizes of this server: the protocol's defaults.
    pub const SERVER: BlockSizes = BlockSizes { minimum: 1, preferred: 4096, maximum: MAX_PAYLOAD };
}

impl ExportInfo {
    /// Returns the transmission flags: what a client may send in a session with this reply style. A
    /// snapshot is read-only, so it announces no commands that write.
    pub fn transmission_flags(&self, style: ReplyStyle) -> u16 {
        let always = FLAG_HAS_FLAGS | FLAG_SEND_FLUSH | FLAG_SEND_FUA | FLAG_SEND_CACHE;
        let several = if self.multi_conn { FLAG_CAN_MULTI_CONN } else { 0 };
        let df = if style == ReplyStyle::Simple { 0 } else { FLAG_SEND_DF };
        let writable = FLAG_SEND_TRIM | FLAG_SEND_WRITE_ZEROES | FLAG_SEND_FAST_ZERO;
        always | several | df | if self.read_only { FLAG_READ_ONLY } else { writable }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writable_export_announces_flush_fua_trim_zeroes_and_cache() {
        let mut info =
            ExportInfo { name: "a".into(), description: "".into(), size: 1, read_only: false, multi_conn: true };
        assert_eq!(info.transmission_flags(ReplyStyle::Simple), 0b1101_0110_1101);
        assert_eq!(info.transmission_flags(ReplyStyle::Structured), 0b1101_1110_1101);
        info.read_only = true;
        assert_eq!(info.transmission_flags(ReplyStyle::Simple), 0b0101_0000_1111);
        assert_eq!(info.transmission_flags(ReplyStyle::Extended), 0b0101_1000_1111);
        info.multi_conn = false;
        assert_eq!(info.transmission_flags(ReplyStyle::Extended), 0b0100_1000_1111);
    }
}
