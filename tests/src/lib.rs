//! Cross-process tests live in the `tests` folder of this crate.
