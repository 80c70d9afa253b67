//! NIXL's own functions, by their mangled names. They may throw, so their ABI is `C-unwind`.
//!
//! # Safety
//! Unless a function says otherwise, its callers uphold the conditions of `nixl.h`.

use core::ffi::{CStr, c_int, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

use laxity_job::symbol::{Symbol, function_at};

use crate::abi::{AgentPtr, NixlStatus, OptionalArgs, RequestPtr, status};

/// Printed after the name of a function that no library has.
pub(crate) const ADVICE: &str =
    "is libnixl.so older than what the program was built with? The call fails";

/// Returns a function of NIXL with its type: `real!("name", fn(A) -> B)` is `Option<that
/// function>`.
macro_rules! real {
    ($name:expr, fn($($argument:ty),* $(,)?) $(-> $result:ty)?) => {{
        use laxity_job::symbol::{Symbol, c_name, function_at};
        static REAL: Symbol = Symbol::anywhere(c_name(concat!($name, "\0")));
        type Function = unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?;
        let found = REAL.address_or_say("liblaxity_nixl.so", $crate::real::ADVICE);
        // SAFETY: the caller of the macro writes the type that belongs to the name.
        found.map(|address| unsafe { function_at::<Function>(address) })
    }};
}
pub(crate) use real;

/// Calls NIXL's own `postXferReq`.
pub(crate) unsafe fn post(agent: AgentPtr, request: RequestPtr, extra: OptionalArgs) -> NixlStatus {
    let real = real!(
        "_ZNK9nixlAgent11postXferReqEP12nixlXferReqHPK21nixlAgentOptionalArgs",
        fn(AgentPtr, RequestPtr, OptionalArgs) -> NixlStatus
    );
    // SAFETY: upheld by the caller.
    real.map_or(status::NOT_SUPPORTED, |real| unsafe { real(agent, request, extra) })
}

/// Calls NIXL's own `getXferStatus`.
pub(crate) unsafe fn status_of(agent: AgentPtr, request: RequestPtr) -> NixlStatus {
    let real = real!(
        "_ZNK9nixlAgent13getXferStatusEP12nixlXferReqH",
        fn(AgentPtr, RequestPtr) -> NixlStatus
    );
    // SAFETY: upheld by the caller.
    real.map_or(status::NOT_SUPPORTED, |real| unsafe { real(agent, request) })
}

/// Functions that read a `nixlDescList<D>`. NIXL instantiates them explicitly, so its libraries
/// export them.
#[derive(Debug)]
pub(crate) struct DescFunctions {
    /// `descCount`, `begin` and `end`, which are const.
    symbols: [Symbol; 3],
    /// `getType`, which is also const.
    kind: Symbol,
    /// Whether a lookup failed. A lookup searches all libraries, so it is not repeated. Relaxed: a
    /// hint.
    is_missing: AtomicBool,
}

pub(crate) static BASIC: DescFunctions = DescFunctions::of([
    c"_ZNK12nixlDescListI13nixlBasicDescE9descCountEv",
    c"_ZNK12nixlDescListI13nixlBasicDescE5beginEv",
    c"_ZNK12nixlDescListI13nixlBasicDescE3endEv",
    c"_ZNK12nixlDescListI13nixlBasicDescE7getTypeEv",
]);
pub(crate) static STRIDE: DescFunctions = DescFunctions::of([
    c"_ZNK12nixlDescListI14nixlStrideDescE9descCountEv",
    c"_ZNK12nixlDescListI14nixlStrideDescE5beginEv",
    c"_ZNK12nixlDescListI14nixlStrideDescE3endEv",
    c"_ZNK12nixlDescListI14nixlStrideDescE7getTypeEv",
]);

impl DescFunctions {
    const fn of([count, begin, end, kind]: [&'static CStr; 4]) -> Self {
        let symbols = [Symbol::anywhere(count), Symbol::anywhere(begin), Symbol::anywhere(end)];
        Self { symbols, kind: Symbol::anywhere(kind), is_missing: AtomicBool::new(false) }
    }

    fn addresses(&self) -> Option<[*const c_void; 3]> {
        if self.is_missing.load(Ordering::Relaxed) {
            return None;
        }
        let [count, begin, end] = &self.symbols;
        let found = (|| Some([count.address()?, begin.address()?, end.address()?]))();
        self.is_missing.store(found.is_none(), Ordering::Relaxed);
        found
    }

    /// Returns the `nixl_mem_t` of a list.
    ///
    /// # Safety
    /// As for [`Self::read`].
    pub(crate) unsafe fn kind(&self, list: *const c_void) -> Option<c_int> {
        type Kind = unsafe extern "C-unwind" fn(*const c_void) -> c_int;
        // Where the other functions are missing, this lookup would fail, too.
        self.addresses()?;
        // SAFETY: the type is that of `nixl_descriptors.h`. The caller upholds the rest.
        self.kind.address().map(|kind| unsafe { function_at::<Kind>(kind)(list) })
    }

    /// Returns the number of elements of a list, the address of the first one, and the address
    /// behind the last one.
    ///
    /// # Safety
    /// `list` is a list of the type to which the functions belong.
    pub(crate) unsafe fn read(
        &self,
        list: *const c_void,
    ) -> Option<(c_int, *const c_void, *const c_void)> {
        type Edge = unsafe extern "C-unwind" fn(*const c_void) -> *const c_void;
        type Count = unsafe extern "C-unwind" fn(*const c_void) -> c_int;
        let [count, begin, end] = self.addresses()?;
        // SAFETY: the types are those of `nixl_descriptors.h`. An iterator of a vector is a class
        // with one pointer, which is returned like a pointer. The caller upholds the rest.
        unsafe {
            let read = |edge| function_at::<Edge>(edge)(list);
            Some((function_at::<Count>(count)(list), read(begin), read(end)))
        }
    }
}
