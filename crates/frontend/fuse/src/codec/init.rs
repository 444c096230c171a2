//! The first request of a mount: negotiation of versions and capabilities.

use super::fields::{Fields, Put};

/// Capabilities of the kernel, one bit each, as in the protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// Concurrent reads of one file.
    pub const ASYNC_READ: Capabilities = Capabilities(1 << 0);
    /// Writes of more than a page.
    pub const BIG_WRITES: Capabilities = Capabilities(1 << 5);
    /// Directory listings with attributes.
    pub const READDIRPLUS: Capabilities = Capabilities(1 << 13 | 1 << 14);
    /// Asynchronous direct I/O.
    pub const ASYNC_DIO: Capabilities = Capabilities(1 << 15);
    /// Writes are collected in the kernel's cache.
    pub const WRITEBACK_CACHE: Capabilities = Capabilities(1 << 16);
    /// Concurrent lookups and listings in one folder.
    pub const PARALLEL_DIROPS: Capabilities = Capabilities(1 << 18);
    /// The reply sets the largest request.
    pub const MAX_PAGES: Capabilities = Capabilities(1 << 22);
    /// The file system itself clears set-user-id and set-group-id, and the kernel does not query
    /// `security.capability` before every write.
    pub const HANDLE_KILLPRIV_V2: Capabilities = Capabilities(1 << 28);
    /// Files with I/O that bypasses the kernel's cache can be mapped and shared (Linux 6.6).
    pub const DIRECT_IO_ALLOW_MMAP: Capabilities = Capabilities(1 << 36);
    /// No file handles outlive the kernel's cache: NFS cannot export the file system.
    pub const NO_EXPORT_SUPPORT: Capabilities = Capabilities(1 << 38);
    /// The kernel can send requests again that were received and not answered.
    pub const RESEND: Capabilities = Capabilities(1 << 39);
    /// Requests come through queues of io_uring.
    pub const OVER_IO_URING: Capabilities = Capabilities(1 << 41);
    const INIT_EXT: u64 = 1 << 30;

    /// Returns the union of both.
    pub const fn and(self, other: Capabilities) -> Capabilities {
        Capabilities(self.0 | other.0)
    }

    /// Returns whether it contains all of `other`.
    pub fn has(self, other: Capabilities) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The kernel's offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitRequest {
    /// Major version of the protocol.
    pub major: u32,
    /// Minor version of the protocol.
    pub minor: u32,
    /// Most bytes it reads ahead.
    pub max_readahead: u32,
    /// Capabilities of the kernel.
    pub offered: Capabilities,
}

impl InitRequest {
    pub(super) fn decode(r: &mut Fields<'_>) -> Option<InitRequest> {
        let (major, minor, max_readahead, flags) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?);
        let extended = u64::from(flags) & Capabilities::INIT_EXT != 0;
        let high = if extended { u64::from(r.u32()?) } else { 0 };
        Some(InitRequest { major, minor, max_readahead, offered: Capabilities(u64::from(flags) | high << 32) })
    }
}

/// The reply to the offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitReply {
    /// Most bytes to read ahead.
    pub max_readahead: u32,
    /// Chosen capabilities.
    pub wanted: Capabilities,
    /// Most background requests, for which no program waits.
    pub max_background: u16,
    /// Most bytes of one read or write; a multiple of the page size.
    pub max_write: u32,
}

/// Protocol version of this implementation.
const MAJOR: u32 = 7;
const MINOR: u32 = 40;

impl InitReply {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        let flags = self.wanted.0 | Capabilities::INIT_EXT;
        [MAJOR, MINOR, self.max_readahead, flags as u32].into_iter().for_each(|v| out.u32(v));
        out.u16(self.max_background);
        out.u16(self.max_background / 4 * 3);
        // Granularity of times: 1 ns.
        [self.max_write, 1].into_iter().for_each(|v| out.u32(v));
        out.u16((self.max_write / 4096) as u16);
        out.u16(0);
        out.u32((flags >> 32) as u32);
        out.resize(out.len() + 28, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_high_half_of_what_is_offered_counts_only_if_the_kernel_says_so() {
        let mut bytes = Vec::new();
        [7, 45, 131072, 1 << 30 | 1, 2].into_iter().for_each(|v| bytes.u32(v));
        let init = InitRequest::decode(&mut Fields(&bytes)).expect("whole");
        assert_eq!(init.offered, Capabilities(1 << 33 | 1 << 30 | 1));
        bytes[12..16].copy_from_slice(&1u32.to_ne_bytes());
        assert_eq!(InitRequest::decode(&mut Fields(&bytes)).expect("whole").offered, Capabilities(1));
    }

    #[test]
    fn the_answer_has_the_length_of_the_protocol() {
        let mut out = Vec::new();
        let wanted = Capabilities::ASYNC_READ;
        InitReply { max_readahead: 0, wanted, max_background: 64, max_write: 1 << 20 }.put(&mut out);
        assert_eq!(out.len(), 64);
    }
}
