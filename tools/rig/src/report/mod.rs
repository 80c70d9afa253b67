//! The report of a lab run: numbers ([`measure`]), a table for the terminal and a page.

pub mod contents;
pub mod distribution;
pub mod html;
pub mod measure;
pub mod plot;
pub mod table;

pub use html::html;
pub use table::table;
