//! Replacing some items of a list.

use std::ops::Range;

/// As `Vec::splice`, for short lists of items that are cheap to copy.
pub fn replace<T: Copy>(list: &mut Vec<T>, place: Range<usize>, new: &[T]) {
    let (over, more) = new.split_at(new.len().min(place.len()));
    list[place.start..place.start + over.len()].copy_from_slice(over);
    match more {
        [] => drop(list.drain(place.start + over.len()..place.end)),
        more => more.iter().rev().for_each(|&item| list.insert(place.end, item)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_splice() {
        for (from, to, n) in (0..=6).flat_map(|from| (from..=6).flat_map(move |to| (0..5).map(move |n| (from, to, n))))
        {
            let (mut ours, mut theirs) = ([0, 1, 2, 3, 4, 5].to_vec(), [0, 1, 2, 3, 4, 5].to_vec());
            let new: Vec<i32> = (10..10 + n).collect();
            replace(&mut ours, from..to, &new);
            theirs.splice(from..to, new);
            assert_eq!(ours, theirs);
        }
    }
}
