//! The decision whether Laxity may change the traffic class of a queue pair or a connection.
//!
//! A class selects a priority in the NIC and in switches, and only some priorities are lossless
//! (PFC) or watched for congestion (ECN). A transfer that leaves the lossless priority loses
//! packets, which costs it more than any order gains. So a class that somebody chose stays, and any
//! other class changes only to one that the NIC treats alike.

use core::fmt;

/// The lowest two bits of a traffic class, which belong to ECN.
const ECN: u8 = 0b11;

/// What Laxity does to traffic classes. The numbers stand in a region's header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Marking {
    /// Keeps a class that somebody chose. Changes any other class only to one that the NIC treats
    /// alike.
    #[default]
    Preserve = 1,
    /// Sets the classes of the levels, even where somebody chose another class.
    Levels = 2,
    /// Leaves the class of every packet as the program set it.
    Off = 3,
}

impl Marking {
    /// All values, by number.
    pub const ALL: [Self; 3] = [Self::Preserve, Self::Levels, Self::Off];

    /// Returns the value's name in configurations and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Preserve => "preserve",
            Self::Levels => "levels",
            Self::Off => "off",
        }
    }

    /// Returns the value that is called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|marking| marking.name() == name)
    }

    /// Returns the value with this number. A daemon of an older release writes 0, which is none.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|marking| *marking as u8 == number)
    }
}

/// Which DSCPs the NICs of a host treat alike. Each DSCP has the number of a treatment, such as
/// "lossless, with ECN". 0 stands for an unknown treatment, which is like no other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Treatments([u8; Self::COUNT]);

impl Treatments {
    /// Number of DSCPs, which have six bits.
    pub const COUNT: usize = 64;
    /// Nothing is known about any DSCP.
    pub const UNKNOWN: Self = Self([0; Self::COUNT]);
    /// All DSCPs are treated alike, as by a NIC without priorities.
    pub const ALL_ALIKE: Self = Self([1; Self::COUNT]);

    /// Creates the table from the numbers of the treatments, by DSCP.
    pub const fn new(by_dscp: [u8; Self::COUNT]) -> Self {
        Self(by_dscp)
    }

    /// Returns the numbers of the treatments, by DSCP.
    pub const fn by_dscp(&self) -> &[u8; Self::COUNT] {
        &self.0
    }

    /// Returns the table for a host that sends through both NICs. Two DSCPs are alike there if both
    /// NICs treat them alike.
    pub fn and(&self, other: &Self) -> Self {
        let mut seen = [(0, 0); Self::COUNT];
        let mut count = 0;
        let mut both = [0; Self::COUNT];
        for (dscp, number) in both.iter_mut().enumerate() {
            let pair = (self.0[dscp], other.0[dscp]);
            if pair.0 == 0 || pair.1 == 0 {
                continue;
            }
            let at = seen[..count].iter().position(|known| *known == pair).unwrap_or_else(|| {
                seen[count] = pair;
                count += 1;
                count - 1
            });
            // At most 64 pairs differ.
            *number = at as u8 + 1;
        }
        Self(both)
    }

    /// Returns whether both DSCPs are treated alike, or `None` if that is unknown.
    pub fn alike(&self, one: u8, other: u8) -> Option<bool> {
        if one == other {
            return Some(true);
        }
        let of = |dscp: u8| self.0.get(usize::from(dscp)).copied().filter(|number| *number != 0);
        Some(of(one)? == of(other)?)
    }
}

impl fmt::Debug for Treatments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0).finish()
    }
}

/// The decision about a wanted change of a traffic class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The class may change to this one.
    Change(u8),
    /// Keep the class: the mode of marking sets none.
    Off,
    /// Keep the class, because somebody chose it.
    Chosen,
    /// Keep the class, because the NIC treats the wanted one differently.
    Unlike,
    /// Keep the class, because it is unknown how the NIC treats it or the wanted one.
    Unknown,
}

impl Verdict {
    /// Returns the class that holds after the verdict, where `class` held before.
    #[must_use]
    pub const fn class(self, class: u8) -> u8 {
        match self {
            Self::Change(wanted) => wanted,
            _ => class,
        }
    }
}

/// Decides whether traffic of `class` may get `dscp`. The first of these rules that applies holds:
///
/// 1. [`Marking::Off`] keeps every class.
/// 2. [`Marking::Levels`] changes every class.
/// 3. A chosen class stays, with all eight bits.
/// 4. Without `marking`, the daemon is older than treatments. The class changes, as in its release.
/// 5. The class changes if `treatments` has both DSCPs as alike.
///
/// The bits of ECN stay, because they belong to the network.
pub fn decide(
    marking: Option<Marking>,
    treatments: &Treatments,
    class: u8,
    is_chosen: bool,
    dscp: u8,
) -> Verdict {
    let change = Verdict::Change(dscp << 2 | class & ECN);
    match marking {
        Some(Marking::Off) => Verdict::Off,
        Some(Marking::Levels) => change,
        _ if is_chosen => Verdict::Chosen,
        None => change,
        Some(Marking::Preserve) => match treatments.alike(class >> 2, dscp) {
            Some(true) => change,
            Some(false) => Verdict::Unlike,
            None => Verdict::Unknown,
        },
    }
}
