//! The exploration rule: which of the pending sector versions survive a crash, by number.
//!
//! With k of them: for k ≤ 12 every subset, the number being the subset itself. Otherwise, in this order:
//! nothing, everything, every single loss, every single survivor, every prefix, every suffix, for k ≤ 64
//! every pair lost and every pair alone; all higher numbers are random subsets that follow from the number.

use crate::rng::{Rng, mix};

/// Which of k versions survive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survivors(Vec<bool>);

impl Survivors {
    /// Whether version `unit` survives.
    pub fn has(&self, unit: usize) -> bool {
        self.0[unit]
    }

    /// Returns how many survive.
    pub fn count(&self) -> usize {
        self.0.iter().filter(|&&kept| kept).count()
    }
}

/// Up to this many versions all subsets are taken.
pub const ALL_SUBSETS_WRITES: usize = 12;
/// Up to this many versions all pairs are taken.
pub const ALL_PAIRS_WRITES: usize = 64;

/// Returns how many numbers the rule enumerates for `k` versions; higher numbers are random subsets (for k ≤
/// 12 there is nothing left to draw, they wrap around).
pub fn enumerated(k: usize) -> u64 {
    if k <= ALL_SUBSETS_WRITES {
        return 1 << k;
    }
    let k = k as u64;
    let pairs = if k <= ALL_PAIRS_WRITES as u64 { k * (k - 1) } else { 0 };
    2 + 2 * k + 2 * (k - 1) + pairs
}

/// Returns the survivors under number `mask`. `owner` is the request of each version, ascending, so that
/// random subsets can also lose whole requests.
pub fn survivors(owner: &[u32], mask: u64) -> Survivors {
    let k = owner.len();
    if k <= ALL_SUBSETS_WRITES {
        return Survivors((0..k).map(|i| mask >> i & 1 == 1).collect());
    }
    if mask >= enumerated(k) {
        return random(owner, mask);
    }
    Survivors(systematic(k, mask))
}

fn systematic(k: usize, mask: u64) -> Vec<bool> {
    let mut n = mask as usize;
    if n < 2 {
        return vec![n == 1; k];
    }
    n -= 2;
    for kept in [false, true] {
        if n < k {
            return (0..k).map(|i| (i == n) == kept).collect();
        }
        n -= k;
    }
    if n < k - 1 {
        return (0..k).map(|i| i <= n).collect();
    }
    n -= k - 1;
    if n < k - 1 {
        return (0..k).map(|i| i > n).collect();
    }
    n -= k - 1;
    let pairs = k * (k - 1) / 2;
    let (a, b) = pair(k, n % pairs);
    (0..k).map(|i| (i == a || i == b) == (n >= pairs)).collect()
}

/// Returns the n-th of the pairs (a, b) with a < b < k.
fn pair(k: usize, mut n: usize) -> (usize, usize) {
    let mut a = 0;
    while n >= k - 1 - a {
        n -= k - 1 - a;
        a += 1;
    }
    (a, a + 1 + n)
}

fn random(owner: &[u32], mask: u64) -> Survivors {
    let mut rng = Rng::new(mix(&[mask]));
    let density = *rng.pick(&[1, 4, 8, 8, 12, 15]);
    if rng.one_in(2) {
        return Survivors(owner.iter().map(|_| rng.below(16) < density).collect());
    }
    // Requests survive or are lost completely, but a few of them are torn.
    let mut kept = Vec::with_capacity(owner.len());
    let (mut last, mut fate, mut torn) = (u32::MAX, false, false);
    for &request in owner {
        if request != last {
            (last, fate, torn) = (request, rng.below(16) < density, rng.one_in(16));
        }
        kept.push(if torn { rng.one_in(2) } else { fate });
    }
    Survivors(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn all(k: usize) -> BTreeSet<Vec<bool>> {
        let owner = vec![0; k];
        (0..enumerated(k)).map(|mask| survivors(&owner, mask).0).collect()
    }

    #[test]
    fn up_to_twelve_every_subset_is_there() {
        assert_eq!(all(0).len(), 1);
        assert_eq!(all(12).len(), 4096);
    }

    #[test]
    fn beyond_that_the_rule_is_complete() {
        let k = 13;
        let sets = all(k);
        let with = |n: usize| sets.iter().filter(|s| s.iter().filter(|&&b| b).count() == n).count();
        assert_eq!((with(0), with(k)), (1, 1));
        assert_eq!((with(1), with(k - 1)), (k, k));
        assert_eq!(with(2), k * (k - 1) / 2, "a prefix and a suffix of two are pairs, too");
        assert_eq!(with(k - 2), k * (k - 1) / 2);
        for n in 1..k {
            assert!(sets.contains(&(0..k).map(|i| i < n).collect::<Vec<_>>()), "prefix {n}");
            assert!(sets.contains(&(0..k).map(|i| i >= n).collect::<Vec<_>>()), "suffix {n}");
        }
        assert_eq!(enumerated(65), 2 + 130 + 128);
    }

    #[test]
    fn random_subsets_follow_from_their_number_and_differ() {
        let owner: Vec<u32> = (0..100).map(|i| i / 10).collect();
        let first = enumerated(100);
        let drawn: BTreeSet<Vec<bool>> = (first..first + 50).map(|m| survivors(&owner, m).0).collect();
        assert!(drawn.len() > 40);
        assert_eq!(survivors(&owner, first + 3), survivors(&owner, first + 3));
    }
}
