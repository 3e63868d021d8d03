"""The mechanism: storages and events, arrays and their graph, and the tape that follows a step."""
