//! `laxity lab`: parses what the lab needs and hands it to `laxity-rig`.
