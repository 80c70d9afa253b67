//! Progressive filling as in textbooks, which shares no code with the network and is slow. It
//! raises all rates of a class together and freezes those that cross a port that is used up. It
//! continues with the others and then with the next class.

#[derive(Clone, Debug)]
pub(super) struct Fluid {
    pub(super) path: Vec<usize>,
    pub(super) class: u8,
    pub(super) weight: f64,
}

/// Returns the rate of each transfer. While classes from `floor.0` on have transfers on a port, all
/// higher classes together get no more than the share `1 − floor.1` of it.
pub(super) fn rates(capacities: &[f64], fluids: &[Fluid], floor: Option<(u8, f64)>) -> Vec<f64> {
    let mut rates = vec![0.0; fluids.len()];
    let mut left = capacities.to_vec();
    for class in 0..64 {
        let of_class = |one: &usize| fluids[*one].class == class;
        let mut rising: Vec<usize> = (0..fluids.len()).filter(of_class).collect();
        let members = rising.clone();
        let mut room = left.clone();
        if let Some((first, share)) = floor.filter(|floor| class < floor.0) {
            for (port, room) in room.iter_mut().enumerate() {
                let waits = |one: &Fluid| one.class >= first && one.path.contains(&port);
                if fluids.iter().any(waits) {
                    *room = (*room - capacities[port] * share).max(0.0);
                }
            }
        }
        while !rising.is_empty() {
            // The rates can rise by this much until a port is used up.
            let crossing = |port: usize| {
                let crosses = move |one: &&usize| fluids[**one].path.contains(&port);
                rising.iter().filter(crosses)
            };
            let weight =
                |port: usize| -> f64 { crossing(port).map(|&one| fluids[one].weight).sum() };
            let tight = (0..capacities.len())
                .filter(|&port| crossing(port).next().is_some())
                .min_by(|&a, &b| {
                    let (a, b) = (room[a] / weight(a), room[b] / weight(b));
                    a.total_cmp(&b)
                })
                .expect("a transfer crosses a port");
            let level = room[tight] / weight(tight);
            let frozen: Vec<usize> = crossing(tight).copied().collect();
            rising.retain(|one| !frozen.contains(one));
            for one in frozen {
                rates[one] = level * fluids[one].weight;
                for &port in &fluids[one].path {
                    room[port] = (room[port] - rates[one]).max(0.0);
                }
            }
        }
        for one in members {
            for &port in &fluids[one].path {
                left[port] -= rates[one];
            }
        }
        for (left, capacity) in left.iter_mut().zip(capacities) {
            if *left < capacity * 1e-9 {
                *left = 0.0;
            }
        }
    }
    rates
}
