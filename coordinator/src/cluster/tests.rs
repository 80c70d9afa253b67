//! The cluster's rules, told as stories of daemons.
