"""Rules and plans that several techniques of `offload.states` share."""
