//! Decompression of streams while they are read. A truncated or damaged stream is an error, never a short disk.

use std::io::{self, BufReader, Read};

use liblzma::stream::{CONCATENATED, Stream};

/// Memory limit for an xz stream; `xz -9` needs 65 MiB.
const MAX_MEMORY_BYTES: u64 = 256 << 20;
/// Bytes read from the compressed side at a time.
const PIECE_BYTES: usize = 256 << 10;

/// Returns a reader of the decompressed contents of `of` for the format `name`; several members in
/// a row are one stream. `None` if the format is unknown.
pub fn decompressed<'a>(name: &str, of: impl Read + 'a) -> Option<io::Result<Box<dyn Read + 'a>>> {
    let of = BufReader::with_capacity(PIECE_BYTES, of);
    Some(match name {
        "gzip" => Ok(Box::new(flate2::bufread::MultiGzDecoder::new(of))),
        "bzip2" => Ok(Box::new(bzip2::bufread::MultiBzDecoder::new(of))),
        "xz" => Stream::new_stream_decoder(MAX_MEMORY_BYTES, CONCATENATED)
            .map(|stream| Box::new(liblzma::bufread::XzDecoder::new_stream(of, stream)) as Box<dyn Read>)
            .map_err(io::Error::from),
        "zstd" => zstd::stream::read::Decoder::with_buffer(of).map(|decoder| Box::new(decoder) as Box<dyn Read>),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn compressed(name: &str, bytes: &[u8]) -> Vec<u8> {
        match name {
            "gzip" => {
                let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                out.write_all(bytes).unwrap();
                out.finish().unwrap()
            }
            "bzip2" => {
                let mut out = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
                out.write_all(bytes).unwrap();
                out.finish().unwrap()
            }
            "xz" => liblzma::encode_all(bytes, 1).unwrap(),
            _ => zstd::stream::encode_all(bytes, 1).unwrap(),
        }
    }

    const NAMES: [&str; 4] = ["gzip", "bzip2", "xz", "zstd"];

    fn read(name: &str, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        decompressed(name, bytes).unwrap()?.read_to_end(&mut out)?;
        Ok(out)
    }

    #[test]
    fn members_in_a_row_are_one_stream() {
        for name in NAMES {
            let bytes = [compressed(name, &[1; 100_000]), compressed(name, b"two")].concat();
            assert_eq!(read(name, &bytes).unwrap(), [&[1_u8; 100_000] as &[u8], b"two"].concat(), "{name}");
        }
    }

    #[test]
    fn a_stream_that_is_cut_off_or_damaged_is_an_error() {
        let bytes: Vec<u8> = (0..200_000_u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        for name in NAMES {
            let whole = compressed(name, &bytes);
            for len in [whole.len() - 1, whole.len() / 2, 20] {
                assert!(read(name, &whole[..len]).is_err(), "{name} cut off at {len}");
            }
            let two = [whole.clone(), whole[..whole.len() / 2].to_vec()].concat();
            assert!(read(name, &two).is_err(), "{name}: the second member is cut off");
            let mut damaged = whole;
            let middle = damaged.len() / 2;
            damaged[middle] ^= 0x10;
            if name != "zstd" {
                assert!(read(name, &damaged).is_err(), "{name} damaged");
            }
        }
    }
}
