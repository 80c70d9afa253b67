//! The classes that levels and stages have on the wire: DSCPs, and service levels on InfiniBand.

use laxity_policy::{Level, Stage};
use laxity_shm::layout::LEVELS;
use laxity_shm::marking::Marking;

use super::Config;

impl Config {
    /// Returns the DSCPs by [`Level::row`]. A level that is not configured has the DSCP of the
    /// scavenger.
    pub fn dscp_by_row(&self) -> [u8; Level::ROWS] {
        let mut table = [self.levels.scavenger_dscp; Level::ROWS];
        let count = self.levels.dscp.len().min(Level::ROWS - 1);
        table[..count].copy_from_slice(&self.levels.dscp[..count]);
        table
    }

    /// Returns the DSCPs that all scheduled traffic of a port has, or none if programs may keep
    /// others.
    pub fn dscp_of_port(&self) -> Vec<u8> {
        if self.marking == Marking::Levels { self.dscp_by_row().to_vec() } else { Vec::new() }
    }

    /// Returns the service levels by [`Level::row`], or `None` if none are configured.
    pub fn sl_by_row(&self) -> Option<[u8; Level::ROWS]> {
        let mut table = [*self.levels.sl.last()?; Level::ROWS];
        let count = self.levels.sl.len().min(Level::ROWS - 1);
        table[..count].copy_from_slice(&self.levels.sl[..count]);
        Some(table)
    }

    /// Returns the DSCPs in the order of a region's table: the scavenger first. All are 0
    /// (unmarked) if nothing is to be marked, which clients of every release understand.
    pub fn dscp_of_region(&self) -> [u8; LEVELS] {
        if self.marking == Marking::Off {
            return [0; LEVELS];
        }
        let mut table = self.dscp_by_row();
        table.rotate_right(1);
        table
    }

    /// Returns DSCPs by [`Stage::index`], for transfers whose class can't be chosen one by one.
    /// All are 0 (unmarked) if nothing is to be marked.
    pub fn dscp_of_stages(&self, collective: Level) -> [u8; Stage::ALL.len()] {
        if self.marking == Marking::Off {
            return [0; Stage::ALL.len()];
        }
        let table = self.dscp_by_row();
        Stage::ALL.map(|stage| table[self.row_of(stage, collective)])
    }

    /// Returns service levels by [`Stage::index`], for queue pairs on InfiniBand. Returns `None` if
    /// none are configured, or nothing is to be marked.
    pub fn sl_of_stages(&self, collective: Level) -> Option<[u8; Stage::ALL.len()]> {
        let table = self.sl_by_row().filter(|_| self.marking != Marking::Off)?;
        Some(Stage::ALL.map(|stage| table[self.row_of(stage, collective)]))
    }

    /// Returns the row of the level that stands for a whole stage. Collectives have the level that
    /// credit gives them, KV reuse the next lower level, and P2D the lowest level whose DSCP is not
    /// the scavenger's. Other stages have the level of the scavenger.
    fn row_of(&self, stage: Stage, collective: Level) -> usize {
        match stage {
            Stage::Collective => collective.row(),
            Stage::KvReuse => Level(collective.0.saturating_add(1)).row(),
            Stage::P2d => {
                let scavenger = self.levels.scavenger_dscp;
                let lowest = self.dscp_by_row().into_iter().rposition(|dscp| dscp != scavenger);
                lowest.unwrap_or(Level::SCAVENGER.row())
            }
            _ => Level::SCAVENGER.row(),
        }
    }
}
