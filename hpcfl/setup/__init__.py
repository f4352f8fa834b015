"""From a configuration to what a rank needs for a run: data, method, engines, clients, room in memory."""
