//! The way of a packet through a NIC: DSCP → priority → traffic class (a queue of the NIC) → PFC,
//! ECN and ETS (IEEE 802.1Q clauses 36 and 37).

use laxity_types::marking::Treatments;

/// Number of priorities, and of traffic classes.
pub const PRIORITIES: usize = 8;

/// The field of a packet by which a NIC picks the priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// The DSCP of the IP header.
    Dscp,
    /// The priority of the VLAN tag.
    Pcp,
}

/// How a NIC serves a traffic class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// Before all classes with a lower number, and before all ETS classes.
    Strict,
    /// By credits (IEEE 802.1Qav).
    CreditBased,
    /// With this guaranteed share among the ETS classes, in percent.
    Ets(u8),
    /// In the vendor's way.
    Vendor,
}

/// The settings of one port. A field that no source says is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PriorityMap {
    /// The field that selects the priority.
    pub trust: Option<Trust>,
    /// The priority of each DSCP, if DSCP is trusted.
    pub priority_of_dscp: Option<[u8; Treatments::COUNT]>,
    /// The traffic class of each priority.
    pub class_of_priority: Option<[u8; PRIORITIES]>,
    /// How each traffic class is served.
    pub selection: Option<[Selection; PRIORITIES]>,
    /// Bit mask of the priorities with PFC.
    pub pfc: Option<u8>,
    /// Bit mask of the priorities with ECN for RoCE.
    pub ecn: Option<u8>,
}

impl PriorityMap {
    /// Returns the priority of a DSCP, or `None` if it is unknown, or another field selects it.
    pub fn priority(&self, dscp: u8) -> Option<u8> {
        if self.trust != Some(Trust::Dscp) {
            return None;
        }
        let table = self.priority_of_dscp.as_ref()?;
        table.get(usize::from(dscp)).copied().filter(|p| usize::from(*p) < PRIORITIES)
    }

    /// Returns the traffic class of a DSCP.
    pub fn class(&self, dscp: u8) -> Option<u8> {
        let priority = self.priority(dscp)?;
        self.class_of_priority.map(|table| table[usize::from(priority)])
    }

    /// Returns whether packets of a DSCP wait rather than drop at this port.
    #[must_use]
    pub fn is_lossless(&self, dscp: u8) -> Option<bool> {
        Some(self.pfc? >> self.priority(dscp)? & 1 == 1)
    }

    /// Returns the bit mask of the priorities whose queues the NIC serves only while the queues of
    /// all these DSCPs are empty. The mask is 0 unless all these DSCPs are known to have strict
    /// queues.
    #[must_use]
    pub fn yields_to(&self, dscps: &[u8]) -> u8 {
        let (Some(class_of), Some(selection)) = (self.class_of_priority, self.selection) else {
            return 0;
        };
        let classes = || dscps.iter().map(|dscp| self.class(*dscp).map(usize::from));
        let is_strict = |class: usize| selection.get(class) == Some(&Selection::Strict);
        if dscps.is_empty() || !classes().all(|class| class.is_some_and(is_strict)) {
            return 0;
        }
        let lowest = classes().flatten().min().unwrap_or(0);
        let yields = |class: usize| match selection.get(class) {
            Some(Selection::Strict) => class < lowest,
            Some(Selection::Ets(_)) => true,
            _ => false,
        };
        let of = |(at, class): (usize, &u8)| u8::from(yields(usize::from(*class))) << at;
        class_of.iter().enumerate().map(of).fold(0, |mask, bit| mask | bit)
    }

    /// Returns which DSCPs the port treats alike: those whose priorities agree in PFC and ECN.
    /// Without DSCP in trust, the port treats all alike. ECN that can't be read counts as the same
    /// on all priorities, because most drivers have one setting for the port.
    pub fn treatments(&self) -> Treatments {
        if self.trust == Some(Trust::Pcp) {
            return Treatments::ALL_ALIKE;
        }
        let number = |dscp: usize| {
            let (Some(pfc), Some(priority)) = (self.pfc, self.priority(dscp as u8)) else {
                return 0;
            };
            let ecn = self.ecn.unwrap_or(0);
            1 + (pfc >> priority & 1) + 2 * (ecn >> priority & 1)
        };
        Treatments::new(core::array::from_fn(number))
    }
}
