//! Mooncake's own functions, which this library interposes.

use core::sync::atomic::{AtomicBool, Ordering};

use laxity_job::symbol::Symbol;

/// Prints that no library has a function. The program was linked against one that has it.
pub(crate) fn say_missing(symbol: &Symbol) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        eprintln!(
            "laxity: {} was called, and no library of this process has it besides \
             liblaxity_mooncake.so: is libtransfer_engine.so missing from what the program links? \
             The call fails",
            symbol.name().to_string_lossy()
        );
    }
}

/// Returns a function of Mooncake with its type: `real!("name", fn(A) -> B)` is `Option<that
/// function>`.
macro_rules! real {
    ($name:literal, $($type:tt)*) => {{
        use laxity_job::symbol::Symbol;
        static REAL: Symbol = Symbol::anywhere($name);
        let found = REAL.address();
        if found.is_none() {
            $crate::real::say_missing(&REAL);
        }
        laxity_job::real!(found, $($type)*)
    }};
}
pub(crate) use real;
