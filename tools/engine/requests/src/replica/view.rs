//! The view of a replica that a discipline reads.

use super::state::State;
use crate::discipline::View;
use crate::job::Job;
use crate::kv::Pool;
use crate::latency::Composition;

impl View for State {
    fn decoding(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(self.seen.iter().map(|slot| &self.at(*slot).job))
    }

    fn decodes(&self) -> Composition {
        self.decodes
    }

    fn in_line(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(self.line.iter().map(|place| &self.at(place.3).job))
    }

    fn aside(&self) -> Box<dyn Iterator<Item = &Job> + '_> {
        Box::new(self.aside.iter().map(|place| &self.at(place.3).job))
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }
}
