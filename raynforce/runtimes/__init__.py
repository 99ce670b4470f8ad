"""Where roles live: in this process, in processes of this machine, or in Ray actors. Only this folder imports ray."""
