module tangram.sh/hack/cluster/pause

go 1.26.0
