//! The plans that come with the program: they are part of it, so that an installed binary has them.

/// A plan that comes with the program.
#[derive(Clone, Copy, Debug)]
pub struct BuiltIn {
    /// Its name.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Whether it is only there for others to inherit from.
    pub is_part: bool,
}

macro_rules! plans {
    ($($kind:ident $name:literal),* $(,)?) => {
        &[$(BuiltIn {
            name: $name,
            text: include_str!(concat!("../../plans/", $name, ".toml")),
            is_part: plans!(@is_part $kind),
        }),*]
    };
    (@is_part plan) => { false };
    (@is_part part) => { true };
}

const BUILT_IN: &[BuiltIn] = plans![
    plan "smoke",
    plan "mfs-figure-5",
    plan "mfs-figure-10",
    plan "mfs-figure-11",
    plan "mfs-figure-12",
    plan "mfs-figure-13",
    plan "mfs-figure-14",
    plan "sweep-agent",
    plan "sweep-conversation",
    plan "sweep-long",
    plan "nic-rates",
    plan "granularity",
    plan "choices",
    plan "requests-by-flows",
    plan "scale-2048",
    plan "scale-2048-hot",
    part "mfs-common",
];

/// All of them, in the order in which lists show them.
#[must_use]
pub fn built_in() -> &'static [BuiltIn] {
    BUILT_IN
}
