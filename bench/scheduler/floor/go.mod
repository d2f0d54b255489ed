module tangram/bench/scheduler/floor

go 1.24
