//! What happens between the layers of a batch: KV of others comes in before its layer, KV for others goes out after it, and the daemon hears where the
//! batch is.

use std::net::SocketAddr;

use candle_core::Result;
use laxity_client::Hint;

use super::Net;
use super::inbox::Key;
use crate::carry::{Head, Kind};
use crate::kv::Pages;
use crate::model::Watch;

/// KV of a request's beginning that is on its way here.
#[derive(Clone, Debug)]
pub struct Import {
    /// The request.
    pub request: u64,
    /// From whom.
    pub from: SocketAddr,
    /// The sequence's blocks.
    pub blocks: Vec<u32>,
    /// The first token that comes.
    pub first: usize,
    /// How many.
    pub tokens: usize,
}

/// KV that goes out as soon as a layer is computed.
#[derive(Clone, Debug)]
pub struct Export {
    /// To whom.
    pub to: SocketAddr,
    /// The request, as the receiver numbers it.
    pub request: u64,
    /// When its first token is due.
    pub deadline_ns: u64,
    /// The sequence's blocks.
    pub blocks: Vec<u32>,
    /// The first token that goes.
    pub first: usize,
    /// How many.
    pub tokens: usize,
}

/// A batch's transfers.
#[derive(Debug)]
pub struct Between<'a> {
    /// Nobody else is there, without it.
    pub net: Option<&'a Net>,
    /// The batch.
    pub batch: u64,
    /// What comes.
    pub imports: Vec<Import>,
    /// What goes.
    pub exports: Vec<Export>,
    /// The daemon is told of layers: there is something to schedule.
    pub hints: bool,
}

impl Watch for Between<'_> {
    fn before_layer(&mut self, layer: usize, pages: &Pages) -> Result<()> {
        let Some(net) = self.net else {
            return Ok(());
        };
        if self.hints {
            net.carrier.hint(Hint::LayerBegin {
                batch: self.batch,
                layer: layer as u16,
            });
        }
        for import in &self.imports {
            let key = Key::Reuse(import.request, layer as u16);
            let payload = net.inbox.wait(key, import.from, net.patience)?;
            let tokens = pages.import(layer, &import.blocks, import.first, &payload)?;
            if tokens != import.tokens {
                candle_core::bail!(
                    "{} sent {tokens} tokens of KV, and said {}",
                    import.from,
                    import.tokens
                );
            }
        }
        Ok(())
    }

    fn after_layer(&mut self, layer: usize, pages: &Pages) -> Result<()> {
        let Some(net) = self.net else {
            return Ok(());
        };
        for export in self.exports.iter().filter(|export| export.tokens > 0) {
            let payload = pages.export(layer, &export.blocks, export.first, export.tokens)?;
            let head = kv_head(Kind::P2d, layer, self.batch, export.request, export.first);
            net.carrier
                .send(export.to, head, export.deadline_ns, payload);
        }
        Ok(())
    }
}

/// The head of a parcel of KV.
#[must_use]
pub const fn kv_head(kind: Kind, layer: usize, batch: u64, request: u64, first: usize) -> Head {
    Head {
        kind,
        layer: layer as u16,
        flow: 0,
        batch,
        request,
        place: first as u64,
        remaining_ns: 0,
        total: 0,
        offset: 0,
        len: 0,
    }
}
