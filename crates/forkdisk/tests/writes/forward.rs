//! Requests that a device of a test passes on as they are.

/// `forward! { len read … }`: these methods of `Device` are those of the field `inner`.
macro_rules! forward {
    ($($method:ident)*) => { $(forward!(@$method);)* };
    (@len) => {
        fn len(&self) -> u64 {
            self.inner.len()
        }
    };
    (@block_size) => {
        fn block_size(&self) -> usize {
            self.inner.block_size()
        }
    };
    (@read) => {
        fn read(
            &self,
            buf: forkdisk::device::Buf,
            segments: forkdisk::device::Segments,
        ) -> impl Future<Output = forkdisk::device::IoResult> + 'static {
            self.inner.read(buf, segments)
        }
    };
    (@flush) => {
        fn flush(&self) -> impl Future<Output = std::io::Result<()>> + 'static {
            self.inner.flush()
        }
    };
    (@discard) => {
        fn discard(&self, offset: u64, len: u64) -> impl Future<Output = std::io::Result<()>> + 'static {
            self.inner.discard(offset, len)
        }
    };
    (@set_len) => {
        fn set_len(&self, len: u64) -> impl Future<Output = std::io::Result<()>> + 'static {
            self.inner.set_len(len)
        }
    };
}
