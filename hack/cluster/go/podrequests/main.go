// Podrequests prints what pods request, as Kubernetes' own helper counts it. The tests compare with it.
//
// Standard input has pods, one JSON document after another. Each is answered by one line: what kube-scheduler
// counts of it as a pod on a node ("holder") and as a pod that is to be placed ("applicant"), with the feature gates
// at their defaults in this release. CPU is in thousandths, everything else in whole units, both rounded up.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	v1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"
)

type answer struct {
	Holder    map[v1.ResourceName]int64 `json:"holder"`
	Applicant map[v1.ResourceName]int64 `json:"applicant"`
}

func counted(list v1.ResourceList) map[v1.ResourceName]int64 {
	amounts := make(map[v1.ResourceName]int64, len(list))
	for name, quantity := range list {
		if name == v1.ResourceCPU {
			amounts[name] = quantity.MilliValue()
		} else {
			amounts[name] = quantity.Value()
		}
	}
	return amounts
}

func run() error {
	in, out := json.NewDecoder(bufio.NewReader(os.Stdin)), bufio.NewWriter(os.Stdout)
	lines := json.NewEncoder(out)
	for {
		var pod v1.Pod
		if err := in.Decode(&pod); errors.Is(err, io.EOF) {
			return out.Flush()
		} else if err != nil {
			return err
		}
		onNode := resource.PodResourcesOptions{
			UseStatusResources: true,
			InPlacePodLevelResourcesVerticalScalingEnabled: true,
		}
		result := answer{ // of copies: the helper may change what it reads
			Holder:    counted(resource.PodRequests(pod.DeepCopy(), onNode)),
			Applicant: counted(resource.PodRequests(pod.DeepCopy(), resource.PodResourcesOptions{})),
		}
		if err := lines.Encode(result); err != nil {
			return err
		}
	}
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "podrequests:", err)
		os.Exit(1)
	}
}
