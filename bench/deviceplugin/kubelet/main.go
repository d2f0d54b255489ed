// The kubelet's side of device plugins, in the kubelet's language and with its gRPC and its messages, so that what a benchmark
// measures is the plugin. It registers plugins, keeps their device lists and the records that the pod resources service reports.
//
// Usage: kubelet FOLDER. Each line of standard input is a command as JSON, each line of standard output its answer.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	books "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// command is one of: ready (wait until the resources have devices), admit, start, remove, options (Times calls that decide nothing).
type command struct {
	Do        string
	Pod       string
	Container string
	Limits    map[string]int
	Times     int
}

// answer has how long the plugin's answers took in all, and what admit was given to mount.
type answer struct {
	Error   string         `json:"error,omitempty"`
	TookUs  int64          `json:"took_us"`
	Devices map[string]int `json:"devices,omitempty"`
	Mounts  []string       `json:"mounts,omitempty"`
}

// seat is one registered plugin.
type seat struct {
	client   plugin.DevicePluginClient
	prestart bool
	healthy  map[string]bool
	used     map[string]bool
}

type held struct {
	container string
	ids       map[string][]string // by resource
}

type kubelet struct {
	plugin.UnimplementedRegistrationServer
	books.UnimplementedPodResourcesListerServer
	folder string

	mutex   sync.Mutex
	changed *sync.Cond
	seats   map[string]*seat // by resource
	pods    map[string]held
}

func (k *kubelet) Register(_ context.Context, request *plugin.RegisterRequest) (*plugin.Empty, error) {
	connection, err := grpc.NewClient("unix://"+filepath.Join(k.folder, "device-plugins", request.Endpoint),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	made := &seat{client: plugin.NewDevicePluginClient(connection), prestart: request.Options.GetPreStartRequired(),
		healthy: map[string]bool{}, used: map[string]bool{}}
	k.mutex.Lock()
	k.seats[request.ResourceName] = made
	k.mutex.Unlock()
	go k.watch(made)
	return &plugin.Empty{}, nil
}

func (k *kubelet) watch(of *seat) {
	stream, err := of.client.ListAndWatch(context.Background(), &plugin.Empty{})
	for err == nil {
		var listed *plugin.ListAndWatchResponse
		if listed, err = stream.Recv(); err != nil {
			break
		}
		healthy := map[string]bool{}
		for _, device := range listed.Devices {
			if device.Health == plugin.Healthy {
				healthy[device.ID] = true
			}
		}
		k.mutex.Lock()
		of.healthy = healthy
		k.changed.Broadcast()
		k.mutex.Unlock()
	}
	fmt.Fprintln(os.Stderr, "a plugin's device list ended:", err)
}

func (k *kubelet) List(context.Context, *books.ListPodResourcesRequest) (*books.ListPodResourcesResponse, error) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	all := &books.ListPodResourcesResponse{}
	for name, has := range k.pods {
		of := &books.ContainerResources{Name: has.container}
		for resource, ids := range has.ids {
			of.Devices = append(of.Devices, &books.ContainerDevices{ResourceName: resource, DeviceIds: ids})
		}
		all.PodResources = append(all.PodResources,
			&books.PodResources{Name: name, Namespace: "default", Containers: []*books.ContainerResources{of}})
	}
	return all, nil
}

// ready waits until every resource of the limits has devices, and returns how many.
func (k *kubelet) ready(limits map[string]int) answer {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	for {
		counts := map[string]int{}
		for resource := range limits {
			if of := k.seats[resource]; of != nil && len(of.healthy) > 0 {
				counts[resource] = len(of.healthy)
			}
		}
		if len(counts) == len(limits) {
			return answer{Devices: counts}
		}
		k.changed.Wait()
	}
}

func (k *kubelet) free(of *seat) []string {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	var free []string
	for id := range of.healthy { // in the random order of maps, as the kubelet's
		if !of.used[id] {
			free = append(free, id)
		}
	}
	return free
}

func (k *kubelet) admit(request command) (answer, error) {
	var took time.Duration
	var mounts []string
	given := map[string][]string{}
	resources := make([]string, 0, len(request.Limits))
	for resource := range request.Limits {
		resources = append(resources, resource)
	}
	slices.Sort(resources)
	rand.Shuffle(len(resources), func(i, j int) { resources[i], resources[j] = resources[j], resources[i] })
	for _, resource := range resources {
		of, count := k.seats[resource], request.Limits[resource]
		free := k.free(of)
		if len(free) < count {
			return answer{}, fmt.Errorf("pod %s: %d of %s are free, %d are requested", request.Pod, len(free), resource, count)
		}
		began := time.Now()
		preferred, err := of.client.GetPreferredAllocation(context.Background(), &plugin.PreferredAllocationRequest{
			ContainerRequests: []*plugin.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: free, AllocationSize: int32(count)}}})
		took += time.Since(began)
		if err != nil {
			return answer{}, err
		}
		ids := preferred.ContainerResponses[0].DeviceIDs
		if len(ids) != count {
			return answer{}, fmt.Errorf("pod %s: %d of %s are preferred, %d were requested", request.Pod, len(ids), resource, count)
		}
		began = time.Now()
		allocated, err := of.client.Allocate(context.Background(), &plugin.AllocateRequest{
			ContainerRequests: []*plugin.ContainerAllocateRequest{{DevicesIds: ids}}})
		took += time.Since(began)
		if err != nil {
			return answer{}, err
		}
		for _, mount := range allocated.ContainerResponses[0].Mounts {
			mounts = append(mounts, mount.HostPath)
		}
		given[resource] = ids
		k.mutex.Lock()
		for _, id := range ids {
			of.used[id] = true
		}
		k.pods[request.Pod] = held{request.Container, given}
		k.mutex.Unlock()
	}
	return answer{TookUs: took.Microseconds(), Mounts: mounts}, nil
}

func (k *kubelet) start(request command) (answer, error) {
	var took time.Duration
	for resource, ids := range k.pods[request.Pod].ids {
		of := k.seats[resource]
		if !of.prestart {
			continue
		}
		began := time.Now()
		_, err := of.client.PreStartContainer(context.Background(), &plugin.PreStartContainerRequest{DevicesIds: ids})
		took += time.Since(began)
		if err != nil {
			return answer{}, err
		}
	}
	return answer{TookUs: took.Microseconds()}, nil
}

func (k *kubelet) remove(request command) (answer, error) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	for resource, ids := range k.pods[request.Pod].ids {
		for _, id := range ids {
			delete(k.seats[resource].used, id)
		}
	}
	delete(k.pods, request.Pod)
	return answer{}, nil
}

func (k *kubelet) options(request command) (answer, error) {
	var took time.Duration
	for resource := range request.Limits {
		for range request.Times {
			began := time.Now()
			if _, err := k.seats[resource].client.GetDevicePluginOptions(context.Background(), &plugin.Empty{}); err != nil {
				return answer{}, err
			}
			took += time.Since(began)
		}
	}
	return answer{TookUs: took.Microseconds()}, nil
}

func (k *kubelet) serve() error {
	for _, name := range []string{"device-plugins", "pod-resources"} {
		if err := os.MkdirAll(filepath.Join(k.folder, name), 0o755); err != nil {
			return err
		}
		listener, err := net.Listen("unix", filepath.Join(k.folder, name, "kubelet.sock"))
		if err != nil {
			return err
		}
		server := grpc.NewServer()
		if name == "device-plugins" {
			plugin.RegisterRegistrationServer(server, k)
		} else {
			books.RegisterPodResourcesListerServer(server, k)
		}
		go func() { fmt.Fprintln(os.Stderr, server.Serve(listener)) }()
	}
	return nil
}

func (k *kubelet) obey(request command) (answer, error) {
	switch request.Do {
	case "ready":
		return k.ready(request.Limits), nil
	case "admit":
		return k.admit(request)
	case "start":
		return k.start(request)
	case "remove":
		return k.remove(request)
	case "options":
		return k.options(request)
	}
	return answer{}, errors.New("do: " + request.Do + "; there are ready, admit, start, remove, options")
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: kubelet FOLDER")
		os.Exit(2)
	}
	k := &kubelet{folder: os.Args[1], seats: map[string]*seat{}, pods: map[string]held{}}
	k.changed = sync.NewCond(&k.mutex)
	if err := k.serve(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	lines, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var request command
		err := json.Unmarshal(lines.Bytes(), &request)
		var result answer
		if err == nil {
			result, err = k.obey(request)
		}
		if err != nil {
			result = answer{Error: err.Error()}
		}
		if err := out.Encode(result); err != nil {
			os.Exit(1)
		}
	}
}
