// Package scheduler tests, with kube-scheduler's own framework and no extender, on which nodes a pod and its placeholder fit: Cluster Autoscaler runs the same
// PreFilter and Filter plugins over real nodes and over the template nodes of node groups.
package scheduler

import (
	"context"
	"encoding/json"
	"os"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	configapi "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/latest"
	"k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins"
	"k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/metrics"
)

const (
	mem, core, whole = "tangram.sh/gpu-mem", "tangram.sh/gpu-core", "tangram.sh/gpu"
	twoGPUs          = "two-gpus"
)

// A node of two GPUs, as it reports itself or as a node group's template says.
func node(name string, gpus bool) *corev1.Node {
	has := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("16"), corev1.ResourceMemory: resource.MustParse("64Gi"), corev1.ResourcePods: resource.MustParse("110"),
	}
	if gpus {
		has[mem], has[core], has[whole] = resource.MustParse("160"), resource.MustParse("200"), resource.MustParse("2")
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelInstanceTypeStable: twoGPUs}},
		Status:     corev1.NodeStatus{Capacity: has, Allocatable: has},
	}
}

func share(name, units, on string) *corev1.Pod {
	amount := corev1.ResourceList{mem: resource.MustParse(units)}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name)},
		Spec: corev1.PodSpec{
			NodeName:   on,
			Containers: []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Limits: amount, Requests: amount}}},
		},
	}
}

func placeholder(t *testing.T) *corev1.Pod {
	t.Helper()
	text, err := os.ReadFile("../testdata/placeholder.json")
	if err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{}
	if err := json.Unmarshal(text, pod); err != nil {
		t.Fatal(err)
	}
	return pod
}

// Do all in-tree plugins of the default configuration pass the pod on this node, with these pods there?
func fits(t *testing.T, pod *corev1.Pod, on *corev1.Node, running ...*corev1.Pod) bool {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	metrics.Register()
	config, err := latest.Default()
	if err != nil {
		t.Fatal(err)
	}
	// it needs ResourceSlices and DeviceClasses, of which no pod here has any
	enabled := config.Profiles[0].Plugins.MultiPoint.Enabled
	config.Profiles[0].Plugins.MultiPoint.Enabled = slices.DeleteFunc(enabled, func(one configapi.Plugin) bool { return one.Name == "DynamicResources" })
	snapshot, client := cache.NewSnapshot(running, []*corev1.Node{on}), fake.NewClientset()
	made, err := runtime.NewFramework(
		ctx, plugins.NewInTreeRegistry(), &config.Profiles[0], runtime.WithClientSet(client), runtime.WithSnapshotSharedLister(snapshot),
		runtime.WithInformerFactory(informers.NewSharedInformerFactory(client, 0)),
	)
	if err != nil {
		t.Fatal(err)
	}
	state := framework.NewCycleState()
	if _, status, _ := made.RunPreFilterPlugins(ctx, state, pod); !status.IsSuccess() {
		t.Logf("PreFilter: %v", status)
		return false
	}
	info, err := snapshot.NodeInfos().Get(on.Name)
	if err != nil {
		t.Fatal(err)
	}
	status := made.RunFilterPlugins(ctx, state, pod, info)
	t.Logf("Filter: %v", status)
	return status.IsSuccess()
}

func TestAPodThatFitsTheSumOfANodeFits(t *testing.T) {
	if !fits(t, share("large", "60", ""), node("n1", true), share("half", "80", "n1")) {
		t.Fatal("it does not fit a node with 80 of 160 units free: an autoscaler would add a node for it")
	}
}

func TestItsPlaceholderFitsANewNodeAndNoneInUse(t *testing.T) {
	if fits(t, placeholder(t), node("n1", true), share("half", "1", "n1")) {
		t.Fatal("the placeholder fits a node in use: no node would be added")
	}
	if !fits(t, placeholder(t), node("template", true)) {
		t.Fatal("the placeholder fits no new node: no node would be added")
	}
}

func TestATemplateWithoutTheResourcesTakesNoPod(t *testing.T) {
	if fits(t, share("large", "60", ""), node("template", false)) {
		t.Fatal("the pod fits a template node that names no GPUs")
	}
}
