//! Requests to the disks of a guest, as text: the guest writes it to the host's file system, the
//! host reads it when the guest has ended.
//!
//! A line is `disk kind offset len`, kind one of `r d m f t` (read, data, metadata, flush, trim),
//! or `begin`, `answered`, `end`: the lines in between belong to one measurement. Lines after
//! `answered` are deferred work for which no client waited.

use std::io::{self, Write};

use anyhow::{Context as _, Result, bail, ensure};
use forkdisk::testing::{Recording, Request, RequestKind};

const KINDS: [(char, RequestKind); 5] = [
    ('r', RequestKind::Read),
    ('d', RequestKind::WriteData),
    ('m', RequestKind::WriteMetadata),
    ('f', RequestKind::Flush),
    ('t', RequestKind::Discard),
];

/// The line before a measurement.
pub const BEGIN: &str = "begin";
/// The line at which the client's work is done.
pub const ANSWERED: &str = "answered";
/// The line after a measurement.
pub const END: &str = "end";

/// Writes the requests of a disk.
pub fn write(out: &mut impl Write, disk: usize, recording: &Recording) -> io::Result<()> {
    for request in &recording.requests {
        let letter = KINDS.iter().find(|(_, kind)| *kind == request.kind).map_or('?', |&(letter, _)| letter);
        writeln!(out, "{disk} {letter} {} {}", request.offset, request.len)?;
    }
    Ok(())
}

/// Requests to the disks during one measurement.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// For each disk, until the client's work was done.
    pub disks: Vec<Recording>,
    /// After that.
    pub later: Vec<Recording>,
}

/// Parses all measurements of a guest with `disks` disks.
pub fn parse(text: &str, disks: usize) -> Result<Vec<Seen>> {
    let mut all = Vec::new();
    let mut current: Option<Seen> = None;
    let mut answered = false;
    for (i, line) in text.lines().enumerate() {
        let place = || format!("line {} of the trace: {line:?}", i + 1);
        match line {
            BEGIN => {
                let none = vec![Recording::default(); disks];
                (current, answered) = (Some(Seen { disks: none.clone(), later: none }), false);
            }
            ANSWERED => answered = true,
            END => all.push(current.take().with_context(place)?),
            _ => {
                let (disk, request) = parse_line(line).with_context(place)?;
                ensure!(disk < disks, "{}: there is no such disk", place());
                if let Some(seen) = &mut current {
                    let recordings = if answered { &mut seen.later } else { &mut seen.disks };
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
        let marked = format!("{text}{BEGIN}\n{text}{ANSWERED}\n{END}\n{text}{BEGIN}\n{ANSWERED}\n{text}{END}\n");
        let all = parse(&marked, 2).unwrap();
        let got = |of: &[Recording]| of.iter().map(|r| r.requests.len()).collect::<Vec<_>>();
        let n = recording.requests.len();
        assert_eq!((got(&all[0].disks), got(&all[0].later)), (vec![0, n], vec![0, 0]), "nothing between counts");
        assert_eq!((got(&all[1].disks), got(&all[1].later)), (vec![0, 0], vec![0, n]));
        assert_eq!(all[0].disks[1].requests, recording.requests);
    }

    #[test]
    fn a_damaged_trace_is_refused() {
        for text in ["end\n", "begin\n", "begin\n0 d 1\nend\n", "begin\n0 x 0 1\nend\n", "7 d 0 1\n"] {
            assert!(parse(text, 1).is_err(), "{text:?}");
        }
    }
}
