//! The functions of `nixlAgent` that this library interposes. Each calls NIXL's own with the
//! program's arguments. No failure here prevents that.
//!
//! # Safety
//! Callers of each function here uphold the conditions of `nixl.h`. References of C++ are pointers
//! that are not null. Where a creation is recorded, `created` points to what NIXL has created, and
//! `list` is a `nixlDescList<D>`.

#![allow(clippy::missing_safety_doc, missing_docs, reason = "said above, once for all functions")]

pub mod others;

use core::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::{
    self, AgentPtr, BasicDesc, IndexSpan, IndexVector, ListPtr, NixlDescriptor, NixlStatus,
    OptionalArgs, RequestPtr, StrideDesc, status,
};
use crate::agent;
use crate::hub::{self, NixlHub};
use crate::lists::{self, PreparedList};
use crate::real::{self, BASIC, DescFunctions, STRIDE};
use crate::report::COUNTERS;
use crate::request::{NixlRequest, PostedLoad};

/// Defines an interposed function: `"SYMBOL" fn name(arguments) |real| { body }`. In the body,
/// `real` is NIXL's own function. A destructor and `releaseMemView` return nothing, so their result
/// is meaningless and unused.
macro_rules! interpose {
    ($($name:literal fn $function:ident($($argument:ident: $type:ty),*) |$real:ident| $body:block)*)
    => {$(
        #[unsafe(export_name = $name)]
        pub unsafe extern "C-unwind" fn $function($($argument: $type),*) -> NixlStatus {
            let Some($real) = $crate::real::real!($name, fn($($type),*) -> NixlStatus) else {
                return status::NOT_SUPPORTED;
            };
            // SAFETY: the caller upholds what this function demands, and `real` demands no more.
            unsafe { $body }
        }
    )*};
}
use interpose;

/// Calls NIXL's function of an agent while the library's thread is not in it. If `tends`, posts the
/// permitted requests first.
fn within<T>(agent: AgentPtr, tends: bool, call: impl FnOnce() -> T) -> T {
    let agent = hub::known().and_then(|hub| hub.agent(agent));
    let inside = agent.as_ref().map(|agent| agent.enter());
    if let Some(inside) = inside.as_ref().filter(|_| tends) {
        inside.tend();
    }
    call()
}

/// Runs this library's part of a creation if that succeeded and transfers wait for permits. A panic
/// in it must not reach C++.
fn besides(code: NixlStatus, body: impl FnOnce(&'static NixlHub)) {
    let body = AssertUnwindSafe(|| hub::make().map(body));
    // NIXL's functions call each other to create objects. Only the outermost call records.
    if code == status::SUCCESS && !agent::is_nested() {
        let _ = catch_unwind(body);
    }
}

/// Records a request that NIXL has created, with the bytes and the first address of its local side.
unsafe fn record(
    hub: &NixlHub,
    agent: AgentPtr,
    operation: c_int,
    local: Option<(u64, u64)>,
    created: *const RequestPtr,
) {
    // SAFETY: upheld by the caller.
    let handle = unsafe { created.read() };
    // An old request with this address was released without this library.
    if let Some(old) = hub.forget(handle) {
        old.state.lock().end();
    }
    match local {
        Some((0, _)) => {}
        Some((bytes, address)) => {
            hub.created(agent, handle, PostedLoad { operation, bytes, address });
        }
        None => hub::unknown(),
    }
}

/// Records a request of two prepared lists. `chosen` are the local descriptors.
unsafe fn record_made(
    hub: &NixlHub,
    agent: AgentPtr,
    operation: c_int,
    (local, remote): (*const c_void, *const c_void),
    chosen: &[c_int],
    created: *const RequestPtr,
) {
    let (local, remote) = (hub.list(local), hub.list(remote));
    let moved = if [&local, &remote].iter().any(|it| it.as_ref().is_some_and(|it| it.is_storage)) {
        Some((0, 0))
    } else {
        local.map(|list| list.chosen(chosen))
    };
    // SAFETY: upheld by the caller.
    unsafe { record(hub, agent, operation, moved, created) };
}

/// Records a prepared list. Of the other side's lists only those of storage are used, since the
/// local side of a transfer has as many bytes as the remote one.
unsafe fn record_list<D: NixlDescriptor>(
    hub: &NixlHub,
    agent: AgentPtr,
    (list, is_local): (*const c_void, bool),
    functions: &DescFunctions,
    created: *const ListPtr,
) {
    // SAFETY: upheld by the caller.
    let (handle, is_memory) = unsafe { (created.read(), abi::is_memory(list, functions)) };
    hub.forget_list(handle);
    if !is_memory {
        hub.prepared(agent, handle, PreparedList::storage());
    } else if is_local
        // SAFETY: upheld by the caller. Without its list, a request counts as unknown.
        && let Some(found) = unsafe { abi::descriptors::<D>(list, functions) }
    {
        hub.prepared(agent, handle, PreparedList::of(found));
    }
}

interpose! {
    "_ZNK9nixlAgent13createXferReqERK14nixl_xfer_op_tRK12nixlDescListI13nixlBasicDescES7_RKNSt7__\
     cxx1112basic_stringIcSt11char_traitsIcESaIcEEERP12nixlXferReqHPK21nixlAgentOptionalArgs"
    fn create(agent: AgentPtr, operation: *const c_int, local: *const c_void,
        remote: *const c_void, name: *const c_void, created: *mut RequestPtr, extra: OptionalArgs)
    |real| {
        let call = || real(agent, operation, local, remote, name, created, extra);
        let code = within(agent, true, call);
        besides(code, |hub| {
            let is_memory = [local, remote].iter().all(|list| abi::is_memory(*list, &BASIC));
            let moved = match is_memory {
                true => abi::descriptors::<BasicDesc>(local, &BASIC).map(lists::whole),
                // A disk or a store moves the bytes, and no NIC.
                false => Some((0, 0)),
            };
            record(hub, agent, *operation, moved, created);
        });
        code
    }

    "_ZNK9nixlAgent11makeXferReqERK14nixl_xfer_op_tPK10nixlDlistHRKSt6vectorIiSaIiEES5_SA_RP12ni\
     xlXferReqHPK21nixlAgentOptionalArgs"
    fn make_of_vectors(agent: AgentPtr, operation: *const c_int, local: *const c_void,
        chosen: *const IndexVector, remote: *const c_void, remote_chosen: *const IndexVector,
        created: *mut RequestPtr, extra: OptionalArgs)
    |real| {
        let code = within(agent, true, || {
            real(agent, operation, local, chosen, remote, remote_chosen, created, extra)
        });
        besides(code, |hub| {
            let chosen = (*chosen).span();
            let chosen = chosen.indices();
            record_made(hub, agent, *operation, (local, remote), chosen, created);
        });
        code
    }

    "_ZNK9nixlAgent11makeXferReqE14nixl_xfer_op_tRK10nixlDlistHSt4spanIKiLm18446744073709551615EE\
     S3_S6_RP12nixlXferReqHPK21nixlAgentOptionalArgs"
    fn make_of_spans(agent: AgentPtr, operation: c_int, local: *const c_void, chosen: IndexSpan,
        remote: *const c_void, remote_chosen: IndexSpan, created: *mut RequestPtr,
        extra: OptionalArgs)
    |real| {
        let code = within(agent, true, || {
            real(agent, operation, local, chosen, remote, remote_chosen, created, extra)
        });
        besides(code, |hub| {
            let chosen = chosen.indices();
            record_made(hub, agent, operation, (local, remote), chosen, created);
        });
        code
    }

    "_ZNK9nixlAgent13prepXferDlistERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERK12nixl\
     DescListI13nixlBasicDescERP10nixlDlistHPK21nixlAgentOptionalArgs"
    fn prepare_named(agent: AgentPtr, name: *const c_void, list: *const c_void,
        created: *mut ListPtr, extra: OptionalArgs)
    |real| {
        let code = within(agent, false, || real(agent, name, list, created, extra));
        besides(code, |hub| {
            record_list::<BasicDesc>(hub, agent, (list, abi::is_empty(name)), &BASIC, created);
        });
        code
    }

    "_ZNK9nixlAgent13prepXferDlistERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERK12nixl\
     DescListI14nixlStrideDescERP10nixlDlistHPK21nixlAgentOptionalArgs"
    fn prepare_strided_named(agent: AgentPtr, name: *const c_void, list: *const c_void,
        created: *mut ListPtr, extra: OptionalArgs)
    |real| {
        let code = within(agent, false, || real(agent, name, list, created, extra));
        besides(code, |hub| {
            record_list::<StrideDesc>(hub, agent, (list, abi::is_empty(name)), &STRIDE, created);
        });
        code
    }

    "_ZNK9nixlAgent13prepXferDlistERK12nixlDescListI13nixlBasicDescERP10nixlDlistHPK21nixlAgentOp\
     tionalArgs"
    fn prepare(agent: AgentPtr, list: *const c_void, created: *mut ListPtr, extra: OptionalArgs)
    |real| {
        let code = within(agent, false, || real(agent, list, created, extra));
        besides(code, |hub| record_list::<BasicDesc>(hub, agent, (list, true), &BASIC, created));
        code
    }

    "_ZNK9nixlAgent13prepXferDlistERK12nixlDescListI14nixlStrideDescERP10nixlDlistHPK21nixlAgentO\
     ptionalArgs"
    fn prepare_strided(agent: AgentPtr, list: *const c_void, created: *mut ListPtr,
        extra: OptionalArgs)
    |real| {
        let code = within(agent, false, || real(agent, list, created, extra));
        besides(code, |hub| record_list::<StrideDesc>(hub, agent, (list, true), &STRIDE, created));
        code
    }

    "_ZNK9nixlAgent14releasedDlistHEP10nixlDlistH"
    fn release_list(agent: AgentPtr, list: ListPtr)
    |real| {
        if let Some(hub) = hub::known() {
            hub.forget_list(list);
        }
        within(agent, false, || real(agent, list))
    }

    "_ZNK9nixlAgent16getXferTelemetryEPK12nixlXferReqHR17nixlXferTelemetry"
    fn telemetry(agent: AgentPtr, handle: RequestPtr, answer: *mut c_void)
    |real| {
        let code = within(agent, false, || real(agent, handle, answer));
        let known = hub::known().filter(|_| !agent::is_nested());
        let known = known.and_then(|hub| hub.request(agent, handle));
        // While a repost waits, NIXL has the telemetry of the post before.
        let is_older = |it: &NixlRequest| it.state.lock().is_deferred();
        if code == status::SUCCESS && known.is_some_and(|(_, request)| is_older(&request)) {
            return status::IN_PROG;
        }
        code
    }

    "_ZNK9nixlAgent14releaseXferReqEP12nixlXferReqH"
    fn release(agent: AgentPtr, handle: RequestPtr)
    |real| {
        let is_nested = agent::is_nested();
        // Permitted requests are not posted first, since this request may be one of them.
        within(agent, false, || {
            let known = hub::known().filter(|_| !is_nested);
            let known = known.and_then(|hub| Some((hub, hub.forget(handle)?)));
            let Some((hub, request)) = known else { return real(agent, handle) };
            let mut state = request.state.lock();
            if state.is_deferred() {
                state.end();
            }
            // Nobody else calls NIXL for the request meanwhile, since that takes its lock.
            let code = real(agent, handle);
            if code == status::SUCCESS {
                state.end();
            } else {
                // NIXL refuses to release a transfer in flight that it can't cancel.
                drop(state);
                hub.remember(handle, request);
            }
            code
        })
    }

    "_ZN9nixlAgentD1Ev"
    fn destroy(agent: AgentPtr)
    |real| {
        forget_agent(agent);
        real(agent)
    }

    "_ZN9nixlAgentD2Ev"
    fn destroy_base(agent: AgentPtr)
    |real| {
        forget_agent(agent);
        real(agent)
    }
}

fn forget_agent(agent: AgentPtr) {
    let _ = catch_unwind(|| hub::known().map(|hub| hub.destroyed(agent)));
}

#[unsafe(export_name = "_ZNK9nixlAgent11postXferReqEP12nixlXferReqHPK21nixlAgentOptionalArgs")]
pub unsafe extern "C-unwind" fn post(
    agent: AgentPtr,
    handle: RequestPtr,
    extra: OptionalArgs,
) -> NixlStatus {
    if agent::is_nested() {
        // SAFETY: upheld by the caller.
        return unsafe { real::post(agent, handle, extra) };
    }
    COUNTERS.posts.add(1);
    let known = hub::known().and_then(|hub| Some((hub, hub.request(agent, handle)?)));
    let Some((hub, (entered, request))) = known else {
        // SAFETY: upheld by the caller.
        return within(agent, true, || unsafe { real::post(agent, handle, extra) });
    };
    let inside = entered.enter();
    inside.tend();
    // SAFETY: upheld by the caller, who is in the agent now.
    unsafe { hub.post(&entered, &request, extra) }
}

#[unsafe(export_name = "_ZNK9nixlAgent13getXferStatusEP12nixlXferReqH")]
pub unsafe extern "C-unwind" fn status_of(agent: AgentPtr, handle: RequestPtr) -> NixlStatus {
    if agent::is_nested() {
        // SAFETY: upheld by the caller.
        return unsafe { real::status_of(agent, handle) };
    }
    let known = hub::known().and_then(|hub| hub.request(agent, handle));
    let Some((entered, request)) = known else {
        // SAFETY: upheld by the caller.
        return within(agent, true, || unsafe { real::status_of(agent, handle) });
    };
    let inside = entered.enter();
    // SAFETY: upheld by the caller, who is in the agent now.
    let code = unsafe { request.status(&mut request.state.lock()) };
    inside.tend();
    code
}

/// Makes this library pass all posts of a request through, because its owner waits for permits
/// itself. `laxity.nixl` calls this after it has created a request. It finds the function with
/// `dlsym(RTLD_DEFAULT, "laxity_nixl_exempt")`.
#[unsafe(no_mangle)]
pub extern "C" fn laxity_nixl_exempt(handle: RequestPtr) {
    let known = hub::known().and_then(|hub| Some((hub, hub.forget(handle)?)));
    let Some((hub, request)) = known else { return };
    if request.state.lock().is_open() {
        // A request that was posted before must not be lost.
        hub.remember(handle, request);
    } else {
        COUNTERS.exempt.add(1);
    }
}
