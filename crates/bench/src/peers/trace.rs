//! What reached the disks of a guest, as text: the guest writes it to the host's file system, the host
//! reads it when the guest has ended.
//!
//! A line is `disk kind offset len`, kind one of `r d m f t` (read, data, metadata, flush, trim), or
//! `begin`, `end`: what lies between belongs to one measurement.

use std::io::{self, Write};

use anyhow::{Context as _, Result, bail, ensure};
use forkdisk::device::{Recording, Request, RequestKind};

const KINDS: [(char, RequestKind); 5] = [
    ('r', RequestKind::Read),
    ('d', RequestKind::WriteData),
    ('m', RequestKind::WriteMetadata),
    ('f', RequestKind::Flush),
    ('t', RequestKind::Discard),
];

/// The line before a measurement.
pub const BEGIN: &str = "begin";
/// The line behind it.
pub const END: &str = "end";

/// Writes what a disk got.
pub fn write(out: &mut impl Write, disk: usize, recording: &Recording) -> io::Result<()> {
    for request in &recording.requests {
        let letter = KINDS.iter().find(|(_, kind)| *kind == request.kind).map_or('?', |&(letter, _)| letter);
        writeln!(out, "{disk} {letter} {} {}", request.offset, request.len)?;
    }
    Ok(())
}

/// What each measurement's disks got.
pub fn parse(text: &str, disks: usize) -> Result<Vec<Vec<Recording>>> {
    let mut all = Vec::new();
    let mut current: Option<Vec<Recording>> = None;
    for (i, line) in text.lines().enumerate() {
        let place = || format!("line {} of the trace: {line:?}", i + 1);
        match line {
            BEGIN => current = Some(vec![Recording::default(); disks]),
            END => all.push(current.take().with_context(place)?),
            _ => {
                let (disk, request) = parse_line(line).with_context(place)?;
                ensure!(disk < disks, "{}: there is no such disk", place());
                if let Some(recordings) = &mut current {
                    recordings[disk].requests.push(request);
                }
            }
        }
    }
    ensure!(current.is_none(), "the trace ends within a measurement");
    Ok(all)
}

fn parse_line(line: &str) -> Result<(usize, Request)> {
    let fields: Vec<&str> = line.split(' ').collect();
    let [disk, letter, offset, len] = fields[..] else { bail!("four fields are needed") };
    let kind = KINDS.iter().find(|(of, _)| letter.starts_with(*of)).context("no such kind")?.1;
    Ok((disk.parse()?, Request { kind, offset: offset.parse()?, len: len.parse()? }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_told_apart_by_measurement_and_disk() {
        let request = |kind, offset| Request { kind, offset, len: 4096 };
        let requests = KINDS.iter().map(|&(_, kind)| request(kind, 8192)).collect();
        let recording = Recording { requests };
        let mut text = Vec::new();
        write(&mut text, 1, &recording).unwrap();
        let text = String::from_utf8(text).unwrap();
        let all = parse(&format!("{text}{BEGIN}\n{text}{END}\n{text}{BEGIN}\n{END}\n"), 2).unwrap();
        assert_eq!(all.len(), 2);
        assert_eq!(all[0][1].requests, recording.requests);
        assert!(all[0][0].requests.is_empty() && all[1][1].requests.is_empty(), "between measurements nothing counts");
    }

    #[test]
    fn a_damaged_trace_is_refused() {
        for text in ["end\n", "begin\n", "begin\n0 d 1\nend\n", "begin\n0 x 0 1\nend\n", "7 d 0 1\n"] {
            assert!(parse(text, 1).is_err(), "{text:?}");
        }
    }
}
