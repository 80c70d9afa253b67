//! Functions of `nixlAgent` that are only interposed so that the library's thread is not in the
//! agent meanwhile ([`crate::agent`]).

use core::ffi::c_void;

use super::{interpose, within};
use crate::abi::{AgentPtr, NixlStatus, status};

/// An argument that is passed on. These functions have pointers and references, and strings by
/// value, which C++ passes by the address of a copy that the caller destroys.
type Argument = *const c_void;

/// Defines functions of an agent: `name(arguments) tends "SYMBOL"`.
macro_rules! pass_on {
    ($($function:ident($($argument:ident),*) $tends:literal $name:literal;)*) => { interpose! {$(
        $name fn $function(agent: AgentPtr $(, $argument: Argument)*) |real| {
            within(agent, $tends, || real(agent $(, $argument)*))
        }
    )*}};
}

// `true`: a program may call it again and again until something arrives, so it posts the requests
// that are permitted by then.
pass_on! {
    register(descs, extra) false
        "_ZN9nixlAgent11registerMemERK12nixlDescListI12nixlBlobDescEPK21nixlAgentOptionalArgs";
    deregister(descs, extra) false
        "_ZN9nixlAgent13deregisterMemERK12nixlDescListI12nixlBlobDescEPK21nixlAgentOptionalArgs";
    create_backend(kind, params, backend) false
        "_ZN9nixlAgent13createBackendERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt\
         13unordered_mapIS5_S5_St4hashIS5_ESt8equal_toIS5_ESaISt4pairIS6_S5_EEERP12nixlBackendH";
    connect(name, extra) false
        "_ZN9nixlAgent14makeConnectionERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEPK2\
         1nixlAgentOptionalArgs";
    load_metadata(metadata, name) false
        "_ZN9nixlAgent12loadRemoteMDERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERS5_";
    invalidate(name) false
        "_ZN9nixlAgent18invalidateRemoteMDERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE\
         E";
    prepare_view(descs, view, extra) false
        "_ZNK9nixlAgent11prepMemViewERK12nixlDescListI13nixlBasicDescERPvPK21nixlAgentOptionalAr\
         gs";
    prepare_remote_view(descs, view, extra) false
        "_ZNK9nixlAgent11prepMemViewERK12nixlDescListI14nixlRemoteDescERPvPK21nixlAgentOptionalA\
         rgs";
    release_view(view) false "_ZNK9nixlAgent14releaseMemViewEPv";
    estimate(request, duration, margin, method, extra) false
        "_ZNK9nixlAgent16estimateXferCostEPK12nixlXferReqHRNSt6chrono8durationIlSt5ratioILl1ELl1\
         000000EEEES8_R11nixl_cost_tPK21nixlAgentOptionalArgs";
    fetch_metadata(name, extra) false
        "_ZN9nixlAgent13fetchRemoteMDENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEPK21nix\
         lAgentOptionalArgs";
    metadata(metadata) false
        "_ZNK9nixlAgent10getLocalMDERNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
    send_metadata(extra) false
        "_ZNK9nixlAgent11sendLocalMDEPK21nixlAgentOptionalArgs";
    check_metadata(name, descs) false
        "_ZNK9nixlAgent13checkRemoteMDENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERK12ni\
         xlDescListI13nixlBasicDescE";
    backend_params(backend, mems, params) false
        "_ZNK9nixlAgent16getBackendParamsEPK12nixlBackendHRSt6vectorI10nixl_mem_tSaIS4_EERSt13uno\
         rdered_mapINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESE_St4hashISE_ESt8equal_t\
         oISE_ESaISt4pairIKSE_SE_EEE";
    backend_of(request, backend) false
        "_ZNK9nixlAgent16queryXferBackendEPK12nixlXferReqHRP12nixlBackendH";
    partial_metadata(descs, metadata, extra) false
        "_ZNK9nixlAgent17getLocalPartialMDERK12nixlDescListI12nixlBlobDescERNSt7__cxx1112basic_st\
         ringIcSt11char_traitsIcESaIcEEEPK21nixlAgentOptionalArgs";
    invalidate_own(extra) false
        "_ZNK9nixlAgent17invalidateLocalMDEPK21nixlAgentOptionalArgs";
    send_partial_metadata(descs, extra) false
        "_ZNK9nixlAgent18sendLocalPartialMDERK12nixlDescListI12nixlBlobDescEPK21nixlAgentOptional\
         Args";
    query_memory(descs, found, extra) false
        "_ZNK9nixlAgent8queryMemERK12nixlDescListI12nixlBlobDescERSt6vectorISt8optionalISt13unord\
         ered_mapINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESD_St4hashISD_ESt8equal_toI\
         SD_ESaISt4pairIKSD_SD_EEEESaISN_EEPK21nixlAgentOptionalArgs";
    notifications(found, extra) true
        "_ZN9nixlAgent9getNotifsERSt13unordered_mapINSt7__cxx1112basic_stringIcSt11char_traitsIc\
         ESaIcEEESt6vectorIS6_SaIS6_EESt4hashIS6_ESt8equal_toIS6_ESaISt4pairIKS6_S9_EEEPK21nixlA\
         gentOptionalArgs";
    notify(name, message, extra) true
        "_ZNK9nixlAgent8genNotifERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES7_PK21ni\
         xlAgentOptionalArgs";
}
