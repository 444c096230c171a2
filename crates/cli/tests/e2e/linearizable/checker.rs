//! Checks whether the history of a register is linearizable.
//!
//! Just-in-time linearization (Lowe, "Testing for linearizability", 2017): the history is walked in
//! the order of its events, with all possible states of the register: its value, and which of the
//! pending writes have taken effect. An operation that returns must have taken effect by then, so
//! at its return every state is continued by letting pending writes take effect in every order
//! until that one has; states in which it cannot are dropped. The history is linearizable if and
//! only if a state remains at the end. Values need not be unique. A read takes effect at the first
//! moment at which the register holds what it returned, which is never a loss because it changes
//! nothing. The effort is exponential only in the writes of one register that are pending at once.

use std::collections::HashSet;

/// An operation on one register. All times are from one clock that never returns the same time twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    pub invoked: u64,
    pub returned: u64,
    pub action: Action,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Write(u64),
    /// A read that returned this value.
    Read(u64),
}

/// A possible state of the register: its value, and the numbers of the pending operations that have
/// taken effect, in rising order.
type State = (u64, Vec<usize>);

/// Returns the first operation that cannot be explained, if the register initially held `before`.
pub fn first_violation(before: u64, history: &[Operation]) -> Option<Operation> {
    let mut events: Vec<(u64, usize)> = Vec::with_capacity(2 * history.len());
    for (i, operation) in history.iter().enumerate() {
        assert!(operation.invoked < operation.returned, "{operation:?} ends before it begins");
        events.extend([(operation.invoked, i), (operation.returned, i)]);
    }
    events.sort_unstable();
    let mut pending: Vec<usize> = Vec::new();
    let mut states = HashSet::from([(before, Vec::new())]);
    for (time, i) in events {
        if time == history[i].invoked {
            pending.push(i);
            states = states.into_iter().map(|state| with_reads(state, &pending, history)).collect();
            continue;
        }
        states = after_return(states, i, &pending, history);
        pending.retain(|&other| other != i);
        if states.is_empty() {
            return Some(history[i]);
        }
    }
    None
}

/// Returns the state in which all pending reads of its value have taken effect.
fn with_reads((value, mut done): State, pending: &[usize], history: &[Operation]) -> State {
    for &i in pending {
        if history[i].action == Action::Read(value)
            && let Err(place) = done.binary_search(&i)
        {
            done.insert(place, i);
        }
    }
    (value, done)
}

/// Returns all states in which `returning` has taken effect, and removes it from them.
fn after_return(states: HashSet<State>, returning: usize, pending: &[usize], history: &[Operation]) -> HashSet<State> {
    let mut reached = HashSet::new();
    let mut seen = states.clone();
    let mut open: Vec<State> = states.into_iter().collect();
    while let Some((value, mut done)) = open.pop() {
        if let Ok(place) = done.binary_search(&returning) {
            done.remove(place);
            reached.insert((value, done));
            continue;
        }
        for &i in pending {
            let Action::Write(value) = history[i].action else { continue };
            let Err(place) = done.binary_search(&i) else { continue };
            let mut done = done.clone();
            done.insert(place, i);
            let next = with_reads((value, done), pending, history);
            if seen.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(invoked: u64, returned: u64, action: Action) -> Operation {
        Operation { invoked, returned, action }
    }

    use Action::{Read, Write};

    #[test]
    fn one_after_the_other() {
        let history =
            [op(1, 2, Read(7)), op(3, 4, Write(1)), op(5, 6, Read(1)), op(7, 8, Write(0)), op(9, 10, Read(0))];
        assert_eq!(first_violation(7, &history), None);
        assert_eq!(first_violation(6, &history), Some(history[0]));
    }

    #[test]
    fn a_read_beside_a_write_may_find_either() {
        for found in [0, 1] {
            assert_eq!(first_violation(0, &[op(1, 10, Write(1)), op(2, 3, Read(found))]), None);
        }
        let history = [op(1, 10, Write(1)), op(2, 3, Read(2))];
        assert_eq!(first_violation(0, &history), Some(history[1]), "never written");
    }

    #[test]
    fn reads_never_go_back() {
        let history = [op(1, 10, Write(1)), op(2, 3, Read(1)), op(4, 5, Read(0))];
        assert_eq!(first_violation(0, &history), Some(history[2]));
        let overlapping = [op(1, 10, Write(1)), op(2, 5, Read(1)), op(3, 6, Read(0))];
        assert_eq!(first_violation(0, &overlapping), None);
    }

    #[test]
    fn a_write_that_has_returned_is_not_lost() {
        let history = [op(1, 2, Write(1)), op(3, 4, Read(0))];
        assert_eq!(first_violation(0, &history), Some(history[1]));
        let late = [op(1, 2, Write(1)), op(3, 4, Write(2)), op(5, 6, Read(1))];
        assert_eq!(first_violation(0, &late), Some(late[2]));
    }

    #[test]
    fn concurrent_writes_have_one_order_for_all() {
        let writes = [op(1, 10, Write(1)), op(2, 11, Write(2))];
        let reads = |a, b| [op(12, 13, Read(a)), op(14, 15, Read(b))];
        let check = |a, b| first_violation(0, &[&writes[..], &reads(a, b)[..]].concat());
        assert_eq!((check(1, 1), check(2, 2)), (None, None));
        assert_eq!(check(1, 2), Some(reads(1, 2)[1]));
        assert_eq!(check(0, 0), Some(reads(0, 0)[0]), "one of them is the last");
    }

    #[test]
    fn equal_values_of_different_writes_are_told_apart_by_time() {
        let history =
            [op(1, 2, Write(0)), op(3, 4, Write(1)), op(5, 20, Write(0)), op(6, 7, Read(1)), op(8, 9, Read(0))];
        assert_eq!(first_violation(5, &history), None);
        let again = [&history[..], &[op(10, 11, Read(1))]].concat();
        assert_eq!(first_violation(5, &again), Some(again[5]));
    }

    #[test]
    fn a_dozen_pending_writes_are_no_burden() {
        let mut history: Vec<Operation> = (0..12).map(|i| op(i + 1, 100 + i, Write(i + 1))).collect();
        history.extend((0..12).map(|i| op(20 + 2 * i, 21 + 2 * i, Read(12 - i))));
        assert_eq!(first_violation(0, &history), None);
        history.push(op(60, 61, Read(12)));
        assert_eq!(first_violation(0, &history), Some(history[24]));
    }
}
