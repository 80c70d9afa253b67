//! Commands from the rest of the daemon, and the release of clients for garbage. They are rare, so
//! nothing here is on the hot path.

use std::fmt::Display;
use std::sync::Arc;

use laxity_policy::config::InvalidConfig;
use laxity_policy::{DomainId, Span};
use laxity_shm::sleep::current_cpu;
use nix::unistd::{SysconfVar, sysconf};
use tracing::{debug, warn};

use super::ports::{self, DriverPort};
use super::{Driver, on_wire::OnWire};
use crate::clients::{AttachedClient, ClientId, Identity, Leaving, PendingClient};
use crate::config::{Config, Mode};
use crate::domains::Domain;
use crate::mailbox::SchedulerCommand;

/// The time between warnings about garbage. Further garbage is only counted.
const WARN_EVERY: Span = Span::from_millis(1000);
impl Driver {
    /// Runs the commands from the mailbox. Returns false to stop.
    pub(super) fn run_commands(&mut self) -> bool {
        self.intake.now = self.clock.now();
        self.publisher.note_change();
        for command in self.inbox.take() {
            match command {
                SchedulerCommand::Attach { newcomer, attached } => {
                    self.attach(*newcomer);
                    let _ = attached.send(());
                }
                SchedulerCommand::Detach { client, leaving } => {
                    let _ = leaving.send(self.detach(client));
                    // The end of many flows takes milliseconds, and many clients may leave at once.
                    self.attend_to_others();
                }
                SchedulerCommand::Bypass(on) => {
                    self.intake.bypass = on;
                    self.apply_modes(true);
                }
                SchedulerCommand::Configure(config) => {
                    if let Err(error) = self.configure(&config) {
                        warn!(%error, "the new configuration fails; the old one stays in force");
                    }
                }
                SchedulerCommand::Treatments(treatments) => {
                    self.treatments = *treatments;
                    for client in self.clients.iter().flatten() {
                        client.served.header().set_marking(self.config.marking, &self.treatments);
                    }
                }
                SchedulerCommand::Residual { residuals, usage } => {
                    self.apply_residuals(&residuals);
                    let used = self.intake.ports.iter().map(DriverPort::usage).collect();
                    let _ = usage.send((self.config.residual, used));
                }
                SchedulerCommand::Coordinator => {
                    let cluster = &mut self.intake.hints.cluster;
                    cluster.apply_coordinator_update(self.intake.now);
                }
                SchedulerCommand::Publish => self.publisher.ask(),
                SchedulerCommand::Trace(command) => {
                    self.intake.trace.carry_out(self.intake.now, command);
                }
                SchedulerCommand::Explain(command) => self.explain(command),
                SchedulerCommand::Stop { handover } => {
                    self.hands_over = handover;
                    return false;
                }
            }
        }
        self.publisher.progress();
        true
    }

    /// Tells clients whether work requests of queue pairs may use credit whatever their stage. They
    /// may once no flow has waited on any port for a while.
    pub(super) fn announce_idle_ports(&mut self) {
        let contended = |port: &DriverPort| port.link.waiting_flows() > 0;
        // Held flows must ask for permits.
        let waits = self.intake.holding || self.intake.ports.iter().any(contended);
        if self.intake.credit.note_waiting(self.intake.now, waits) {
            let stages = self.intake.credit.stages();
            for client in self.clients.iter().flatten() {
                client.served.header().set_credit_stages(stages);
            }
        }
    }

    fn attach(&mut self, newcomer: PendingClient) {
        let index = self.clients.iter().position(Option::is_none).unwrap_or_else(|| {
            self.clients.push(None);
            self.clients.len() - 1
        });
        let now = self.intake.now;
        let (flows_max, ports) =
            (self.config.scheduler.flows_per_client_max, self.intake.ports.len());
        let mut client = AttachedClient::new(newcomer, now, flows_max, ports);
        client.state.domain = self.enter_domain(&client.state.identity);
        client.state.job = self.publisher.jobs.enter(&client.state.identity);
        let owner = &client.state.identity.owner;
        client.state.suspected = self.suspects(owner);
        client.state.distrusted = self.intake.trust.distrusts(owner);
        if let Err(error) = self.poller.watch(index as u32, client.served.eventfd()) {
            // The client is still served, since sleeps are bounded.
            warn!(%error, client = %client.state.identity.name, "cannot watch a client's eventfd");
        }
        self.describe(&client);
        let header = client.served.header();
        header.set_daemon_cpu(current_cpu());
        header.beat(now.0);
        client.served.set_doorbell(self.order.doorbells());
        client.set_mode(self.config.mode, self.intake.bypass, false);
        self.intake.counters.attachments += 1;
        let domain = client.state.domain;
        self.clients[index] = Some(client);
        self.divide_flows(domain);
        self.order.add(index as u32);
        self.spin.active = now;
    }

    /// Writes the values of the configuration that a client needs into the client's region.
    fn describe(&self, client: &AttachedClient) {
        let header = client.served.header();
        let (config, level) = (&self.config, self.intake.credit.level);
        header.set_dscp(&config.dscp_of_region());
        header.set_dscp_of_stages(config.dscp_of_stages(level));
        header.set_sl_of_stages(config.sl_of_stages(level));
        header.set_marking(config.marking, &self.treatments);
        header.set_nics(config.nic.iter().map(|nic| nic.name.as_str()));
        header.set_credit_class(self.intake.credit.stages(), level.0);
    }

    /// Counts a client into its trust domain and returns the domain's number.
    fn enter_domain(&mut self, identity: &Identity) -> DomainId {
        let scope = self.config.access.trust;
        let domain =
            Domain::of(scope, identity.id.0, identity.kernel_pid, identity.owner.uid, identity.gid);
        let (number, anew) = self.domains.enter(domain);
        self.intake.hints.add_domain(self.intake.now, number, anew);
        if anew {
            self.intake.hint_time.forget(number);
            for port in &mut self.intake.ports {
                port.link.clear(number);
                // Other domains may have more of the port now.
                port.dirty = true;
            }
        }
        number
    }

    /// Gives each client of a domain its part of the domain's flows.
    fn divide_flows(&mut self, domain: DomainId) {
        let scheduler = &self.config.scheduler;
        let part = scheduler.flows_per_domain_max / self.domains.clients(domain).max(1);
        let most = part.clamp(1, scheduler.flows_per_client_max);
        let own = |client: &&mut AttachedClient| client.state.domain == domain;
        for client in self.clients.iter_mut().flatten().filter(own) {
            client.state.flows_max = most;
            client.set_room();
        }
    }

    fn detach(&mut self, id: ClientId) -> Option<Leaving> {
        let index = self
            .clients
            .iter()
            .position(|c| c.as_ref().is_some_and(|c| c.state.identity.id == id))?;
        self.sweep_up(index as u32);
        let mut client = self.clients[index].take()?;
        self.order.remove(index as u32);
        self.poller.forget(client.served.eventfd());
        self.intake.client_gone(index as u32, &mut client);
        self.domains.leave(client.state.domain);
        self.divide_flows(client.state.domain);
        self.publisher.jobs.leave(client.state.job, &client.state.counters);
        while matches!(self.clients.last(), Some(None)) {
            self.clients.pop();
        }
        self.intake.serve(&mut self.clients);
        self.wake_clients();
        Some(client.leave())
    }

    #[cold]
    pub(super) fn quarantine(&mut self, index: u32, lane: u16, problem: &dyn Display) {
        let Some(client) = self.clients[index as usize].as_mut() else { return };
        client.state.counters.garbage_records += 1;
        client.state.quarantined_lanes += 1;
        client.release(false);
        self.intake.client_gone(index, client);
        let identity = &client.state.identity;
        if self.intake.now.since(self.warned) >= WARN_EVERY {
            self.warned = self.intake.now;
            warn!(
                client = %identity.name, id = identity.id.0, pid = identity.pid, lane, %problem,
                "released a client for garbage in its memory; its traffic goes on unscheduled"
            );
        } else {
            debug!(client = %identity.name, lane, %problem, "released a client for garbage");
        }
    }

    pub(super) fn configure(&mut self, config: &Arc<Config>) -> Result<(), InvalidConfig> {
        let now = self.intake.now;
        let known = self.intake.ports.len();
        ports::configure(&mut self.intake.ports, now, config)?;
        self.intake.hints.configure(now, config)?;
        if self.intake.ports.len() > known {
            self.intake.hints.give_order_again();
        }
        self.follow(config);
        self.config = Arc::clone(config);
        self.intake.trust.timeout = Span(config.tuning.completion_timeout.0);
        // On one core, a spinning thread keeps its clients from running. The count is of the
        // machine: a daemon confined to one of many cores has its clients on the others.
        let alone = sysconf(SysconfVar::_NPROCESSORS_ONLN) == Ok(Some(1));
        self.spin.span =
            if alone { Span::ZERO } else { Span::from_micros(config.scheduler.spin_us) };
        if let Some(port) = self.intake.ports.first() {
            self.intake.credit.level = port.link.link(DomainId::default()).credit_level(now);
        }
        for domain in self.domains.numbers() {
            self.divide_flows(domain);
        }
        for (index, client) in self.clients.iter_mut().enumerate() {
            let Some(client) = client else { continue };
            client.state.ports.resize(self.intake.ports.len(), OnWire::default());
            self.intake.release_absent(index as u32, client);
        }
        for client in self.clients.iter().flatten() {
            self.describe(client);
        }
        self.apply_modes(false);
        Ok(())
    }

    fn apply_modes(&mut self, always: bool) {
        self.intake.credit.is_given = self.config.mode == Mode::Enforce && !self.intake.bypass;
        let (mode, bypass) = (self.config.mode, self.intake.bypass);
        for (index, client) in self.clients.iter_mut().enumerate() {
            if let Some(client) = client.as_mut().filter(|c| !c.state.released) {
                client.set_mode(mode, bypass, always);
                if client.mode == Mode::Off {
                    self.intake.release_flows(index as u32, client);
                }
            }
        }
        self.publisher.ask();
    }
}
