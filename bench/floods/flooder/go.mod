module tangram/bench/floods/flooder

go 1.24
