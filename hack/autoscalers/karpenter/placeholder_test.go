// Package karpenter tests, with Karpenter's own scheduling simulation, what it adds for a pod that fits the sum of a node's GPUs and no
// single one, and for the placeholder that Tangram's extender makes for it.
package karpenter

import (
	"context"
	"encoding/json"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
	fakeclient "sigs.k8s.io/controller-runtime/pkg/client/fake"
	v1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/cloudprovider/fake"
	"sigs.k8s.io/karpenter/pkg/controllers/provisioning/scheduling"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	"sigs.k8s.io/karpenter/pkg/events"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	"sigs.k8s.io/karpenter/pkg/operator/options"
	"sigs.k8s.io/karpenter/pkg/test"
)

const (
	mem, core, whole = "tangram.sh/gpu-mem", "tangram.sh/gpu-core", "tangram.sh/gpu"
	twoGPUs          = "two-gpus"
)

func amounts(gpuMem, gpuCore, gpus string) corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("16"), corev1.ResourceMemory: resource.MustParse("64Gi"), corev1.ResourcePods: resource.MustParse("110"),
		mem: resource.MustParse(gpuMem), core: resource.MustParse(gpuCore), whole: resource.MustParse(gpus),
	}
}

// One node of two GPUs with half of each in use: its allocatable is what is left.
func half() *state.StateNode {
	node := state.NewNode()
	node.Node = &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{
			corev1.LabelHostname: "n1", corev1.LabelInstanceTypeStable: twoGPUs, corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux",
		}},
		Spec:   corev1.NodeSpec{ProviderID: "n1"},
		Status: corev1.NodeStatus{Capacity: amounts("80", "100", "2"), Allocatable: amounts("80", "100", "2")},
	}
	return node
}

// What Karpenter would add, by instance type, for these pods. `overlaid`: does a NodeOverlay say what GPUs the instance type has?
func added(t *testing.T, overlaid bool, nodes []*state.StateNode, pods ...*corev1.Pod) []*scheduling.NodeClaim {
	t.Helper()
	ctx := options.ToContext(injection.WithControllerName(context.Background(), "provisioner"), test.Options())
	capacity := amounts("160", "200", "2")
	if !overlaid {
		delete(capacity, mem)
		delete(capacity, core)
		delete(capacity, whole)
	}
	small := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("256Gi"), corev1.ResourcePods: resource.MustParse("110")}
	kinds := []*cloudprovider.InstanceType{
		fake.NewInstanceType(fake.InstanceTypeOptions{Name: "no-gpu", Resources: small}),
		fake.NewInstanceType(fake.InstanceTypeOptions{Name: twoGPUs, Resources: capacity}),
	}
	pool := test.NodePool(v1.NodePool{})
	pools, byPool := []*v1.NodePool{pool}, map[string][]*cloudprovider.InstanceType{pool.Name: kinds}
	provider := fake.NewCloudProvider()
	provider.InstanceTypes = kinds
	api, now := fakeclient.NewFakeClient(), &clock.RealClock{}
	cluster := state.NewCluster(now, api, provider)
	topology, err := scheduling.NewTopology(ctx, api, cluster, nodes, pools, byPool, pods)
	if err != nil {
		t.Fatal(err)
	}
	solver := scheduling.NewScheduler(ctx, api, pools, cluster, nodes, topology, byPool, nil, events.NewRecorder(&record.FakeRecorder{}), now, nil)
	results, err := solver.Solve(ctx, pods)
	if err != nil {
		t.Fatal(err)
	}
	return results.NewNodeClaims
}

// A pod that requests three quarters of a GPU's memory.
func large(name string) *corev1.Pod {
	amount := corev1.ResourceList{mem: resource.MustParse("60")}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name)},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Limits: amount, Requests: amount}}}},
	}
}

func placeholder(t *testing.T, name string) *corev1.Pod {
	t.Helper()
	text, err := os.ReadFile("../testdata/placeholder.json")
	if err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{}
	if err := json.Unmarshal(text, pod); err != nil {
		t.Fatal(err)
	}
	pod.Name, pod.UID = name, types.UID(name)
	return pod
}

func TestAPodThatFitsTheSumOfANodeAddsNone(t *testing.T) {
	if found := added(t, true, []*state.StateNode{half()}, large("a")); len(found) != 0 {
		t.Fatalf("%d nodes for a pod that fits the totals of n1", len(found))
	}
}

func TestItsPlaceholderAddsOneNodeOfItsType(t *testing.T) {
	found := added(t, true, []*state.StateNode{half()}, large("a"), placeholder(t, "p"))
	if len(found) != 1 {
		t.Fatalf("%d nodes, and not one", len(found))
	}
	for _, kind := range found[0].InstanceTypeOptions {
		if kind.Name != twoGPUs {
			t.Fatalf("a node of type %s", kind.Name)
		}
	}
}

func TestTwoPlaceholdersAddTwoNodes(t *testing.T) {
	if found := added(t, true, []*state.StateNode{half()}, placeholder(t, "p"), placeholder(t, "q")); len(found) != 2 {
		t.Fatalf("%d nodes, and not two", len(found))
	}
}

func TestAPlaceholderAddsNoneOnceAnEmptyNodeOfItsTypeIsThere(t *testing.T) {
	empty := half()
	empty.Node.Status.Allocatable = amounts("160", "200", "2")
	if found := added(t, true, []*state.StateNode{empty}, placeholder(t, "p")); len(found) != 0 {
		t.Fatalf("%d nodes beside an empty one", len(found))
	}
}

func TestFromZeroTheNodeOverlayDecides(t *testing.T) {
	if found := added(t, true, nil, large("a")); len(found) != 1 {
		t.Fatalf("%d nodes with a NodeOverlay, and not one", len(found))
	}
	if found := added(t, false, nil, large("a")); len(found) != 0 {
		t.Fatalf("%d nodes without a NodeOverlay: no instance type has GPUs", len(found))
	}
}
