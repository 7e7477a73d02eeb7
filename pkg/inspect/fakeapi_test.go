package inspect

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"
)

// fakeAPI implements the part of an API server that the command uses, over HTTP and JSON: lists in pages, label
// selectors and field selectors. client-go's fake clientset has no pages and no field selectors, and is not reached by HTTP. Clients
// have the rights of the ClusterRole gpushare-viewer only.
type fakeAPI struct {
	*httptest.Server
	maxPage int // The maximum page size, even if the client requests more.

	mu       sync.Mutex // Guards the fields below.
	version  int
	objects  map[string]object // By kind, namespace and name.
	requests []string
	status   int // If not zero, the status of all responses.
	// namespace, if it isn't empty, is the only one in which the client has rights.
	namespace string
	// podGroups is "PodGroup" if the API server has PodGroups, else empty.
	podGroups string
	// stalled, if it isn't nil, makes all responses stop in the middle until the client cancels the request. Each one is
	// announced.
	stalled chan struct{}
}

// object is a node, pod or namespace, or a builder of one: its copy is the object itself.
type object interface {
	metav1.Object
	runtime.Object
}

func newFakeAPI(t *testing.T, objects Objects) *fakeAPI {
	api := &fakeAPI{maxPage: 500, version: 100, objects: map[string]object{}}
	for _, n := range objects.Nodes {
		api.put(n)
	}
	for _, p := range slices.Concat(objects.Pods, objects.Others) {
		api.put(p)
	}
	api.Server = httptest.NewServer(api)
	t.Cleanup(func() {
		api.CloseClientConnections()
		api.Close()
	})
	return api
}

// put creates or updates an object.
func (api *fakeAPI) put(o object) {
	api.mu.Lock()
	defer api.mu.Unlock()
	api.version++
	o = o.DeepCopyObject().(object)
	o.SetResourceVersion(strconv.Itoa(api.version))
	o.GetObjectKind().SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(kindOf(o)))
	api.objects[keyOf(o)] = o
}

func (api *fakeAPI) remove(o object) {
	api.mu.Lock()
	defer api.mu.Unlock()
	delete(api.objects, keyOf(o.DeepCopyObject().(object)))
}

func keyOf(o object) string { return kindOf(o) + "/" + o.GetNamespace() + "/" + o.GetName() }

// viewer is the ClusterRole gpushare-viewer.
var viewer = sync.OnceValue(func() (role rbacv1.ClusterRole) {
	text, err := os.ReadFile("../../deploy/inspect/viewer.yaml")
	if err == nil {
		err = yaml.Unmarshal(slices.Collect(bytes.SplitSeq(text, []byte("\n---\n")))[0], &role)
	}
	if err != nil {
		panic(err)
	}
	return role
})

// viewerMay reports whether the ClusterRole gpushare-viewer allows a list of a path of all namespaces.
func viewerMay(path string) bool {
	group, parts := "", strings.Split(path, "/")
	if parts[1] == "apis" {
		group = parts[2]
	}
	return slices.ContainsFunc(viewer().Rules, func(r rbacv1.PolicyRule) bool {
		return slices.Contains(r.APIGroups, group) && slices.Contains(r.Resources, parts[len(parts)-1]) && slices.Contains(r.Verbs, "list")
	})
}

func kindOf(o object) string { return reflect.TypeOf(o).Elem().Name() }

// answerWith makes all further requests fail with an HTTP status. Zero restores normal operation.
func (api *fakeAPI) answerWith(status int) {
	api.mu.Lock()
	defer api.mu.Unlock()
	api.status = status
}

func (api *fakeAPI) seen() []string {
	api.mu.Lock()
	defer api.mu.Unlock()
	return slices.Clone(api.requests)
}

func (api *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	api.mu.Lock()
	api.requests = append(api.requests, r.URL.RequestURI())
	status := api.status
	api.mu.Unlock()
	query := r.URL.Query()
	path := r.URL.Path
	inNamespace := ""
	if parts := strings.Split(path, "/"); len(parts) == 6 && parts[3] == "namespaces" {
		inNamespace, path = parts[4], "/api/v1/"+parts[5]
	}
	kind := map[string]string{
		"/api/v1/nodes": "Node", "/api/v1/pods": "Pod", "/api/v1/namespaces": "Namespace", "/apis/scheduling.k8s.io/v1beta1/podgroups": api.podGroups,
	}[path]
	labelled, err1 := labels.Parse(query.Get("labelSelector"))
	fielded, err2 := fields.ParseSelector(query.Get("fieldSelector"))
	selected := func(o object) bool {
		return kindOf(o) == kind && (inNamespace == "" || o.GetNamespace() == inNamespace) && labelled.Matches(labels.Set(o.GetLabels())) && fielded.Matches(fieldsOf(o))
	}
	w.Header().Set("Content-Type", "application/json")
	switch {
	case status != 0:
		http.Error(w, "refused by the test", status)
	case api.namespace != "" && api.namespace != inNamespace, kind != "" && !viewerMay(path):
		w.WriteHeader(http.StatusForbidden)
		_ = json.NewEncoder(w).Encode(apierrors.NewForbidden(corev1.Resource(strings.ToLower(kind)+"s"), "", nil).Status())
	case api.stalled != nil:
		_, _ = w.Write(make([]byte, 16<<20)) // More than the network buffers: the client is reading the body.
		api.stalled <- struct{}{}
		<-r.Context().Done()
	case kind == "" || err1 != nil || err2 != nil:
		http.Error(w, "no such request", http.StatusNotFound)
	default:
		api.list(w, query.Get("limit"), query.Get("continue"), kind, selected)
	}
}

func fieldsOf(o object) fields.Set {
	set := fields.Set{"metadata.name": o.GetName()}
	if pod, ok := o.(*corev1.Pod); ok {
		set["spec.nodeName"], set["status.phase"] = pod.Spec.NodeName, string(pod.Status.Phase)
	}
	return set
}

func (api *fakeAPI) list(w http.ResponseWriter, limit, from, kind string, selected func(object) bool) {
	api.mu.Lock()
	defer api.mu.Unlock()
	items := []object{}
	for _, o := range api.objects {
		if selected(o) {
			items = append(items, o)
		}
	}
	slices.SortFunc(items, func(a, b object) int {
		return strings.Compare(a.GetNamespace()+"/"+a.GetName(), b.GetNamespace()+"/"+b.GetName())
	})
	start, _ := strconv.Atoi(from)
	meta := map[string]string{"resourceVersion": strconv.Itoa(api.version)}
	items = items[min(start, len(items)):]
	if n, _ := strconv.Atoi(limit); n > 0 && len(items) > min(n, api.maxPage) {
		items = items[:min(n, api.maxPage)]
		meta["continue"] = strconv.Itoa(start + len(items))
	}
	version := "v1"
	if kind == "PodGroup" {
		version = schedulingv1beta1.SchemeGroupVersion.String()
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"apiVersion": version, "kind": kind + "List", "metadata": meta, "items": items})
}
