//! Mooncake's own functions, which this library interposes.

/// Printed after the name of a function that no library has.
pub(crate) const ADVICE: &str =
    "is libtransfer_engine.so missing from what the program links? The call fails";

/// Returns a function of Mooncake with its type: `real!(name, fn(A) -> B)` is `Option<that
/// function>`.
macro_rules! real {
    ($name:ident, $($type:tt)*) => {{
        use laxity_job::symbol::{Symbol, c_name};
        static REAL: Symbol = Symbol::anywhere(c_name(concat!(stringify!($name), "\0")));
        let address = REAL.address_or_say("liblaxity_mooncake.so", $crate::real::ADVICE);
        laxity_job::real!(address, $($type)*)
    }};
}
pub(crate) use real;

/// Defines interposed functions: `fn name(arguments) -> result, otherwise, |real| { body }`. In the
/// body, `real` is Mooncake's own function. Without it the function returns `otherwise`.
macro_rules! interpose {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty, $otherwise:expr,)?
        |$real:ident| $body:block)*)
    => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
            let Some($real) = $crate::real::real!($name, fn($($type),*) $(-> $result)?) else {
                return $($otherwise)?;
            };
            // SAFETY: the caller upholds what this function demands, and `real` demands no more.
            unsafe { $body }
        }
    )*};
}
pub(crate) use interpose;
