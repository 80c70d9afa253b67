//! What a transfer is for: MFS §2.2 and §3.1, plus two stages that no request waits for.
//!
//! The table at the end of this file defines every stage: number, name, and the deadline that its
//! flows have. To add a stage, add a row there, then follow *Add a stage* in CONTRIBUTING.

use core::fmt;

/// The deadline that the flows of a stage have. It decides how a policy treats a stage that the
/// policy does not name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// The computation waits for the bytes (MFS §4.4). The paper calls these stages early.
    Implicit,
    /// The request is due at a known instant (MFS §4.3). The paper calls this the last stage.
    Explicit,
    /// No request waits for the bytes. Policies put such flows into the scavenger.
    None,
}

macro_rules! stages {
    ($(
        $(#[$attribute:meta])* $stage:ident = $number:literal, $name:literal, $deadline:ident;
    )*) => {
        /// What a flow is for.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Stage {
            $($(#[$attribute])* $stage = $number,)*
        }

        impl Stage {
            /// All stages, in the order of their numbers.
            pub const ALL: [Self; [$($number),*].len()] = [$(Self::$stage),*];

            /// Returns the name in configuration, metrics, files and reports.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$stage => $name,)*
                }
            }

            /// Returns the kind of deadline that flows of this stage have.
            #[must_use]
            pub const fn deadline(self) -> Deadline {
                match self {
                    $(Self::$stage => Deadline::$deadline,)*
                }
            }

            /// Returns the stage of a number, or `None` if the number is invalid. The number may
            /// come from another process.
            #[inline]
            pub const fn from_number(number: u8) -> Option<Self> {
                Some(match number {
                    $($number => Self::$stage,)*
                    _ => return None,
                })
            }
        }
    };
}

impl Stage {
    /// Returns the stage of a [`Stage::name`], or `None` if no stage has that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|stage| stage.name() == name)
    }

    /// Returns the zero-based index, for tables with a row per stage.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize - 1
    }

    /// Returns the bit of this stage in a set of stages.
    #[must_use]
    pub const fn bit(self) -> u8 {
        1 << self as u8
    }

    /// Reports whether the computation waits for flows of this stage: [`Deadline::Implicit`].
    #[must_use]
    pub const fn is_early(self) -> bool {
        matches!(self.deadline(), Deadline::Implicit)
    }

    /// Reports whether no request waits for flows of this stage: [`Deadline::None`].
    #[must_use]
    pub const fn is_scavenged(self) -> bool {
        matches!(self.deadline(), Deadline::None)
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

// Tables are indexed by stage, and a set of stages has eight bits.
const _: () = {
    let mut index = 0;
    while index < Stage::ALL.len() {
        assert!(Stage::ALL[index].index() == index, "numbers follow each other from 1");
        index += 1;
    }
    assert!(Stage::ALL.len() < 8, "`Stage::bit` has room for seven stages");
};

stages! {
    /// Stage 1: the fetch of KV-cache blocks that were computed before.
    KvReuse = 1, "kv_reuse", Implicit;
    /// Stage 2: a collective inside a layer.
    Collective = 2, "collective", Implicit;
    /// Stage 3: the transfer of a layer's KV cache from prefill to decode.
    P2d = 3, "p2d", Explicit;
    /// Weights of a model that is being loaded.
    Weights = 4, "weights", None;
    /// Transfers of no other stage.
    #[default]
    Background = 5, "background", None;
}
