"""Each module has ``run(workload, turn, **options)``, which calls ``turn()`` before every round and never returns."""
