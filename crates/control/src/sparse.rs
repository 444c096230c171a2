//! Data ranges of a file, and non-zero pages of a buffer.

use std::fs::File;
use std::io;
use std::ops::Range;

use forkdisk::PAGE_SIZE;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// Iterator over the ranges of a file that may hold data, in rising order, cut off at `len`. On a
/// file system without support for holes there is one range.
pub struct DataRuns<'a> {
    file: &'a File,
    at: u64,
    len: u64,
}

impl<'a> DataRuns<'a> {
    /// Creates the iterator over the first `len` bytes of `file`. Moves the file's position.
    pub fn new(file: &'a File, len: u64) -> DataRuns<'a> {
        DataRuns { file, at: 0, len }
    }

    fn step(&mut self) -> io::Result<Option<Range<u64>>> {
        if self.at >= self.len {
            return Ok(None);
        }
        let start = match seek(self.file, SeekFrom::Data(self.at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(Errno::INVAL | Errno::NOTSUP) => self.at,
            Err(error) => return Err(error.into()),
        };
        let end = match seek(self.file, SeekFrom::Hole(start)) {
            Ok(end) => end.min(self.len),
            Err(Errno::INVAL | Errno::NOTSUP) => self.len,
            // The file was truncated meanwhile: nothing is left to read.
            Err(Errno::NXIO) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        self.at = end;
        Ok((start < end).then_some(start..end))
    }
}

impl Iterator for DataRuns<'_> {
    type Item = io::Result<Range<u64>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.step().transpose()
    }
}

/// Returns the runs of pages in `bytes` that are not all zero; the last page may be short.
pub fn nonzero_pages(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (i, page) in bytes.chunks(PAGE_SIZE).enumerate() {
        if is_zero(page) {
            continue;
        }
        let start = i * PAGE_SIZE;
        let end = start + page.len();
        match runs.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => runs.push(start..end),
        }
    }
    runs
}

fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn pages_that_are_not_zero_come_in_runs() {
        let mut bytes = vec![0; 5 * PAGE_SIZE + 10];
        assert_eq!(nonzero_pages(&bytes), []);
        bytes[PAGE_SIZE - 1] = 1;
        bytes[PAGE_SIZE] = 1;
        bytes[3 * PAGE_SIZE + 5] = 1;
        bytes[5 * PAGE_SIZE + 9] = 1;
        let expected = [0..2 * PAGE_SIZE, 3 * PAGE_SIZE..4 * PAGE_SIZE, 5 * PAGE_SIZE..5 * PAGE_SIZE + 10];
        assert_eq!(nonzero_pages(&bytes), expected);
    }

    #[test]
    fn runs_of_a_file_cover_what_was_written() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(10 << 20).unwrap();
        file.write_all_at(b"x", 1 << 20).unwrap();
        file.write_all_at(b"y", (10 << 20) - 1).unwrap();
        let runs: Vec<_> = DataRuns::new(&file, 10 << 20).map(Result::unwrap).collect();
        for at in [1 << 20, (10 << 20) - 1] {
            assert!(runs.iter().any(|run| run.contains(&at)), "{at} in {runs:?}");
        }
        assert!(runs.is_sorted_by_key(|run| run.start) && runs.iter().all(|run| run.end <= 10 << 20));
    }

    #[test]
    fn an_empty_file_has_no_runs() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(DataRuns::new(&file, 0).count(), 0);
        file.set_len(1 << 20).unwrap();
        assert!(DataRuns::new(&file, 1 << 20).all(|run| run.is_ok()));
    }
}
