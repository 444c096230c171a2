//! Recognition of image formats by magic numbers, so that no other format is taken for a raw image.

/// Bytes of the beginning and of the end that [`recognise`] examines.
pub const LOOKED_AT_BYTES: usize = 512;

/// How an image format is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The bytes of the disk themselves.
    Raw,
    /// A compressed stream, which is decompressed as it is read.
    Compressed {
        /// Command that writes the decompressed contents to standard output.
        by_hand: &'static str,
    },
    /// A virtual disk that QEMU's tools can read.
    Disk {
        /// QEMU's name for it.
        driver: &'static str,
    },
}

/// An image format and its magic numbers.
#[derive(Debug, PartialEq, Eq)]
pub struct Format {
    /// Its name as a value of `--format`.
    pub name: &'static str,
    /// How it is handled.
    pub kind: Kind,
    /// Magic numbers; any of them identifies the format.
    signs: &'static [Sign],
}

/// A magic number and its place.
#[derive(Debug, PartialEq, Eq)]
enum Sign {
    /// Offset from the beginning, bytes.
    At(usize, &'static [u8]),
    /// Bytes at the beginning, and an offset with other bytes.
    Both(&'static [u8], usize, &'static [u8]),
    /// Bytes at the beginning of the last 512 bytes.
    InTail(&'static [u8]),
}

use Sign::{At, Both, InTail};

const fn disk(name: &'static str, signs: &'static [Sign]) -> Format {
    Format { name, kind: Kind::Disk { driver: name }, signs }
}

const RAW: Format = Format { name: "raw", kind: Kind::Raw, signs: &[] };

impl Format {
    /// The bytes of the disk themselves.
    pub const RAW: &'static Format = &RAW;
}

/// All known formats.
pub static FORMATS: [Format; 13] = [
    RAW,
    Format { name: "qcow", kind: Kind::Disk { driver: "qcow" }, signs: &[Both(b"QFI\xfb", 4, &[0, 0, 0, 1])] },
    disk("qcow2", &[At(0, b"QFI\xfb")]),
    disk("qed", &[At(0, b"QED\0")]),
    disk("vmdk", &[At(0, b"KDMV"), At(0, b"COWD"), At(0, b"# Disk DescriptorFile")]),
    disk("vhdx", &[At(0, b"vhdxfile")]),
    disk("vdi", &[At(64, &[0x7f, 0x10, 0xda, 0xbe])]),
    Format { name: "vhd", kind: Kind::Disk { driver: "vpc" }, signs: &[At(0, b"conectix"), InTail(b"conectix")] },
    disk("parallels", &[At(0, b"WithoutFreeSpace"), At(0, b"WithouFreSpacExt")]),
    Format { name: "gzip", kind: Kind::Compressed { by_hand: "gzip -dc" }, signs: &[At(0, &[0x1f, 0x8b, 8])] },
    Format { name: "xz", kind: Kind::Compressed { by_hand: "xz -dc" }, signs: &[At(0, b"\xfd7zXZ\0")] },
    Format { name: "zstd", kind: Kind::Compressed { by_hand: "zstd -dc" }, signs: &[At(0, &[0x28, 0xb5, 0x2f, 0xfd])] },
    Format {
        name: "bzip2",
        kind: Kind::Compressed { by_hand: "bzip2 -dc" },
        signs: &[Both(b"BZh", 4, b"1AY&SY"), Both(b"BZh", 4, &[0x17, 0x72, 0x45, 0x38, 0x50, 0x90])],
    },
];

impl Sign {
    fn is_in(&self, head: &[u8], tail: &[u8]) -> bool {
        let has = |at: usize, bytes: &[u8]| head.get(at..at + bytes.len()) == Some(bytes);
        match self {
            At(at, bytes) => has(*at, bytes),
            Both(first, at, then) => has(0, first) && has(*at, then),
            InTail(bytes) => tail.starts_with(bytes),
        }
    }
}

/// Returns the format of a file that begins with `head` and whose last 512 bytes are `tail` (empty
/// if unknown); `None` if no magic number matches, so that the file is taken as raw.
pub fn recognise(head: &[u8], tail: &[u8]) -> Option<&'static Format> {
    FORMATS.iter().find(|format| format.signs.iter().any(|sign| sign.is_in(head, tail)))
}

/// Returns the format that `--format` calls `name`.
pub fn named(name: &str) -> Option<&'static Format> {
    FORMATS.iter().find(|format| format.name == name)
}

/// Returns the message for a format that cannot be imported, with what to do; `shown` names the image.
pub fn not_read(format: &Format, shown: &str) -> String {
    let name = format.name;
    let Kind::Disk { driver } = format.kind else {
        return format!("{shown}: compressed twice ({name}): decompress it once, then import it");
    };
    format!(
        "{shown}: is in the format {name}, not a raw image: convert it with `qemu-img convert -f {driver} -O raw \
         FILE RAW` and import that; --format raw imports the bytes as they are"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(len: usize, at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut head = vec![0; len];
        head[at..at + bytes.len()].copy_from_slice(bytes);
        head
    }

    #[test]
    fn every_format_is_recognised_by_its_magic_number() {
        for (name, head) in [
            ("qcow2", at(512, 0, b"QFI\xfb\0\0\0\x03")),
            ("qcow2", at(512, 0, b"QFI\xfb\0\0\0\x02")),
            ("qcow", at(512, 0, b"QFI\xfb\0\0\0\x01")),
            ("vmdk", at(512, 0, b"KDMV")),
            ("vmdk", b"# Disk DescriptorFile\nversion=1\n".to_vec()),
            ("vhdx", at(512, 0, b"vhdxfile")),
            ("vdi", at(512, 64, &0xbeda_107f_u32.to_le_bytes())),
            ("vhd", at(512, 0, b"conectix")),
            ("gzip", vec![0x1f, 0x8b, 8, 0]),
            ("xz", b"\xfd7zXZ\0\0\x04".to_vec()),
            ("zstd", vec![0x28, 0xb5, 0x2f, 0xfd, 0]),
            ("bzip2", b"BZh91AY&SY".to_vec()),
        ] {
            assert_eq!(recognise(&head, &[]).map(|format| format.name), Some(name));
        }
        assert_eq!(recognise(&[0; 512], b"conectix\0\0").map(|format| format.name), Some("vhd"));
    }

    #[test]
    fn a_disk_is_raw() {
        // A partition table, an ext4 superblock, a text, and less than any magic number.
        for head in [at(512, 510, &[0x55, 0xaa]), at(512, 0, b"BZh"), b"hello".to_vec(), vec![0x1f], Vec::new()] {
            assert_eq!(recognise(&head, &head), None);
        }
    }

    #[test]
    fn every_format_has_a_name_of_its_own() {
        for (i, format) in FORMATS.iter().enumerate() {
            assert!(std::ptr::eq(named(format.name).unwrap(), &FORMATS[i]));
        }
        assert_eq!(named("none"), None);
    }
}
