//! How far apart the kernel's watermarks are for a value of `vm.watermark_scale_factor`, and which value brings them so far apart: pure
//! arithmetic.
//!
//! In each zone, low is above min and high above low by the same distance: ten thousandths of the zone's memory, as many as the setting
//! says, but no less than a quarter of min (`__setup_per_zone_wmarks`, 4.6).

use crate::sys::vmstat::Zone;

/// The setting counts ten thousandths.
pub const PARTS: u64 = 10_000;

/// The least value that the kernel takes.
pub const FACTOR_LEAST: u64 = 1;
/// The most that every kernel takes (some take 3000).
pub const FACTOR_MOST: u64 = 1000;

/// The distances in a node's zones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watermarks {
    /// What is managed, and the least distance, zone by zone.
    zones: Vec<(u64, u64)>,
}

impl Watermarks {
    /// Those of the node with the kernel's number `node`, of whose `zones` are those of all nodes.
    pub fn of(node: usize, zones: &[Zone]) -> Watermarks {
        let of_node = zones.iter().filter(|zone| zone.node == node);
        Watermarks { zones: of_node.map(|zone| (zone.managed, zone.min / 4)).collect() }
    }

    /// All of the node's memory.
    pub fn managed(&self) -> u64 {
        self.zones.iter().map(|(managed, _)| managed).sum()
    }

    /// What lies below the watermark min, over all zones.
    pub fn min(&self) -> u64 {
        self.zones.iter().map(|(_, least)| 4 * least).sum()
    }

    /// The distance for a value of the setting, over all zones.
    pub fn gap(&self, factor: u64) -> u64 {
        self.zones.iter().map(|&(managed, least)| share(managed, factor).max(least)).sum()
    }

    /// The least value for which the distance is `gap`, or the most that there is.
    pub fn factor(&self, gap: u64) -> u64 {
        let (mut least, mut most) = (FACTOR_LEAST, FACTOR_MOST);
        while least < most {
            let middle = (least + most) / 2;
            if self.gap(middle) >= gap { most = middle } else { least = middle + 1 }
        }
        least
    }
}

fn share(managed: u64, factor: u64) -> u64 {
    (u128::from(managed) * u128::from(factor) / u128::from(PARTS)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn zone(node: usize, managed: u64, min: u64) -> Zone {
        Zone { node, managed, min, low: 0, high: 0 }
    }

    #[test]
    fn as_the_kernel_sets_them() {
        // 6.18 with 24 GiB, read from /proc/zoneinfo for 10 and 200.
        let zones = [zone(0, 15 * MIB, 44 << 10), zone(0, 3000 * MIB, 8 * MIB), zone(0, 21_000 * MIB, 58 * MIB)];
        let watermarks = Watermarks::of(0, &zones);
        assert_eq!(watermarks.gap(10), 15 * MIB / 1000 + 3 * MIB + 21 * MIB);
        assert_eq!(watermarks.gap(200), 15 * MIB / 50 + 60 * MIB + 420 * MIB);
        // A small zone with much of the reserve has a quarter of min.
        assert_eq!(Watermarks::of(1, &[zone(1, 100 * MIB, 40 * MIB)]).gap(10), 10 * MIB);
        assert_eq!((Watermarks::of(1, &zones).gap(1000), watermarks.managed()), (0, 24_015 * MIB));
    }

    proptest! {
        #[test]
        fn the_value_for_a_distance_is_the_least_that_brings_it(
            zones in proptest::collection::vec((1u64..1 << 46, 0u64..1 << 34), 1..5),
            gap in 0u64..1 << 44,
        ) {
            let watermarks = Watermarks { zones };
            let factor = watermarks.factor(gap);
            prop_assert!((FACTOR_LEAST..=FACTOR_MOST).contains(&factor));
            prop_assert!(watermarks.gap(factor) >= gap || factor == FACTOR_MOST);
            prop_assert!(factor == FACTOR_LEAST || watermarks.gap(factor - 1) < gap);
        }
    }
}
