//! Methods of [`Device`](super::Device) that an implementation does not write itself.
//!
//! The trait has no default methods, so that a decorator which forgets one does not compile. An implementation names
//! what it forwards ([`forward_device!`](crate::forward_device)) and what it does not support
//! ([`plain_device!`](crate::plain_device)).

/// Implements the named methods of [`Device`](crate::device::Device) by those of a field.
///
/// ```text
/// impl<D: Device> Device for Counting<D> {
///     forward_device! { inner: len block_size buffer read flush cork stripe discard allocate set_len }
///     plain_device! { can_clone clone_range zero_range }
///     fn write(&self, …) … { … }
/// }
/// ```
#[macro_export]
#[collapse_debuginfo(yes)]
macro_rules! forward_device {
    ($inner:tt: $($method:ident)*) => { $($crate::forward_device!(@$method $inner);)* };
    (@len $inner:tt) => {
        fn len(&self) -> u64 {
            $crate::device::Device::len(&self.$inner)
        }
    };
    (@block_size $inner:tt) => {
        fn block_size(&self) -> usize {
            $crate::device::Device::block_size(&self.$inner)
        }
    };
    (@buffer $inner:tt) => {
        fn buffer(&self, len: usize) -> $crate::device::Buf {
            $crate::device::Device::buffer(&self.$inner, len)
        }
    };
    (@read $inner:tt) => {
        fn read(
            &self,
            buf: $crate::device::Buf,
            segments: $crate::device::Segments,
        ) -> impl ::std::future::Future<Output = $crate::device::IoResult> + 'static {
            $crate::device::Device::read(&self.$inner, buf, segments)
        }
    };
    (@write $inner:tt) => {
        fn write(
            &self,
            buf: $crate::device::Buf,
            segments: $crate::device::Segments,
            fua: bool,
        ) -> impl ::std::future::Future<Output = $crate::device::IoResult> + 'static {
            $crate::device::Device::write(&self.$inner, buf, segments, fua)
        }
    };
    (@cork $inner:tt) => {
        fn cork(&self, more: bool) {
            $crate::device::Device::cork(&self.$inner, more);
        }
    };
    (@stripe $inner:tt) => {
        fn stripe(&self) -> Option<u64> {
            $crate::device::Device::stripe(&self.$inner)
        }
    };
    (@flush $inner:tt) => {
        fn flush(&self) -> impl ::std::future::Future<Output = ::std::io::Result<()>> + 'static {
            $crate::device::Device::flush(&self.$inner)
        }
    };
    (@discard $inner:tt) => {
        fn discard(
            &self,
            offset: u64,
            len: u64,
        ) -> impl ::std::future::Future<Output = ::std::io::Result<()>> + 'static {
            $crate::device::Device::discard(&self.$inner, offset, len)
        }
    };
    (@allocate $inner:tt) => {
        fn allocate(
            &self,
            offset: u64,
            len: u64,
        ) -> impl ::std::future::Future<Output = ::std::io::Result<()>> + 'static {
            $crate::device::Device::allocate(&self.$inner, offset, len)
        }
    };
    (@can_clone $inner:tt) => {
        fn can_clone(&self, source: &Self) -> bool {
            $crate::device::Device::can_clone(&self.$inner, &source.$inner)
        }
    };
    (@clone_range $inner:tt) => {
        fn clone_range(
            &self,
            source: &Self,
            from: u64,
            to: u64,
            len: u64,
        ) -> impl ::std::future::Future<Output = ::std::io::Result<()>> + 'static {
            $crate::device::Device::clone_range(&self.$inner, &source.$inner, from, to, len)
        }
    };
    (@zero_range $inner:tt) => {
        fn zero_range(
            &self,
            offset: u64,
            len: u64,
        ) -> impl ::std::future::Future<Output = ::std::io::Result<()>> + 'static {
            $crate::device::Device::zero_range(&self.$inner, offset, len)
        }
    };
    (@set_len $inner:tt) => {
        fn set_len(&self, len: u64) -> impl ::std::future::Future<Output = ::std::io::Result<()>> + 'static {
            $crate::device::Device::set_len(&self.$inner, len)
        }
    };
}

/// Implements the named optional methods of [`Device`](crate::device::Device) for a device without the feature:
/// `buffer` (zeroed memory), `cork` and `allocate` (nothing happens), `stripe` (none), `can_clone` (false),
/// `clone_range`, `zero_range` and `set_len` (`Unsupported`).
#[macro_export]
#[collapse_debuginfo(yes)]
macro_rules! plain_device {
    ($($method:ident)*) => { $($crate::plain_device!(@$method);)* };
    (@buffer) => {
        fn buffer(&self, len: usize) -> $crate::device::Buf {
            $crate::device::Buf::zeroed(len)
        }
    };
    (@cork) => {
        fn cork(&self, _more: bool) {}
    };
    (@stripe) => {
        fn stripe(&self) -> Option<u64> {
            None
        }
    };
    (@allocate) => {
        fn allocate(
            &self,
            _offset: u64,
            _len: u64,
        ) -> impl ::std::future::Future<Output = ::std::io::Result<()>> + 'static {
            ::std::future::ready(Ok(()))
        }
    };
    (@can_clone) => {
        fn can_clone(&self, _source: &Self) -> bool {
            false
        }
    };
    (@clone_range) => {
        fn clone_range(
            &self,
            _source: &Self,
            _from: u64,
            _to: u64,
            _len: u64,
        ) -> impl ::std::future::Future<Output = ::std::io::Result<()>> + 'static {
            ::std::future::ready(Err(::std::io::ErrorKind::Unsupported.into()))
        }
    };
    (@zero_range) => {
        fn zero_range(
            &self,
            _offset: u64,
            _len: u64,
        ) -> impl ::std::future::Future<Output = ::std::io::Result<()>> + 'static {
            ::std::future::ready(Err(::std::io::ErrorKind::Unsupported.into()))
        }
    };
    (@set_len) => {
        fn set_len(&self, _len: u64) -> impl ::std::future::Future<Output = ::std::io::Result<()>> + 'static {
            ::std::future::ready(Err(::std::io::ErrorKind::Unsupported.into()))
        }
    };
}
