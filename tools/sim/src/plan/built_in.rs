//! Built-in plans. They are part of the binary, so that no installed files are needed.

#[derive(Clone, Copy, Debug)]
pub struct BuiltIn {
    pub name: &'static str,
    pub text: &'static str,
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
    plan "mfs-figure-9",
    plan "mfs-figure-10",
    plan "mfs-figure-11",
    plan "mfs-figure-12",
    plan "mfs-figure-13",
    plan "mfs-figure-14",
    plan "sweep-agent",
    plan "sweep-conversation",
    plan "sweep-long",
    plan "never-below",
    plan "nic-rates",
    plan "granularity",
    plan "choices",
    plan "where-it-helps",
    plan "foreign-traffic",
    plan "opponents",
    plan "opponents-long",
    plan "requests-by-flows",
    plan "scale-2048",
    plan "scale-2048-hot",
    part "mfs-load",
    part "mfs-common",
];

pub fn built_in() -> &'static [BuiltIn] {
    BUILT_IN
}
