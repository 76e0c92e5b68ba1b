#!lua flags=allow-oom
-- Whether this server takes writes, as it says before any script that may write: one that is a
-- replica, has too few of them or cannot save refuses this one, too. Writes nothing, has no keys.
return { 'ok' }
