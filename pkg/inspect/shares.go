package inspect

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"
	"unique"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// SharesKind is the kind of the JSON and YAML output of --shares. Its apiVersion is ReportAPIVersion.
const SharesKind = "GPUShareShares"

// Shares is the list of all tenants.
type Shares struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// Total is the GPU memory that the tenants share, without what is free on unhealthy cards. It is in units, as all amounts are.
	Total   gpu.Memory `json:"total"`
	Tenants []Tenant   `json:"tenants"`
	// Problems are what is wrong with namespaces, tenants and settings, and that nodes have different units.
	Problems []string `json:"problems"`
}

// Tenant is a tenant as the API server shows it: a pod waits until it has a node.
type Tenant struct {
	dispatch.Tenant
	// Cause is why the next of them isn't bound, apart from its turn; empty if none waits.
	Cause string `json:"cause"`
}

// runShares prints the tenants.
func (o *options) runShares(ctx context.Context, client kubernetes.Interface) error {
	objects, err := read(ctx, client, scope{})
	if err != nil {
		return err
	}
	var namespaces []*corev1.Namespace
	err = each(ctx, "namespaces", client.CoreV1().Namespaces().List, metav1.ListOptions{}, func(namespace *corev1.Namespace) {
		namespaces = append(namespaces, namespace)
	})
	if err != nil {
		return err
	}
	settings, err := readShareSettings(ctx, client)
	if err != nil {
		return err
	}
	if o.shareBy != "" {
		settings.Label, _ = dispatch.TenantLabel(o.shareBy) // validate has checked it.
	}
	page, err := o.drawShares(BuildShares(objects, namespaces, settings, time.Now()))
	if settings.Off {
		page.remarks += "Fair sharing is off: these are the shares with --fair-share=dispatch.\n"
	}
	if settings.PriorityCutoff <= 0 {
		page.remarks += fmt.Sprintf("Pods without a priority need no turn, because --fair-share-priority-cutoff is %d: raise it (default %d).\n",
			settings.PriorityCutoff, dispatch.DefaultPriorityCutoff)
	}
	if settings.Unknown {
		page.remarks += "No pod of the extender is running, so its flags aren't known: these are the shares with the defaults.\n"
	}
	return o.print(page, err)
}

// ShareSettings are the extender's settings for fair sharing.
type ShareSettings struct {
	// Label is the key of the label whose value names the tenant; empty if each namespace is one.
	Label string
	// PriorityCutoff is the priority from which on pods need no turn.
	PriorityCutoff int32
	// WithoutGroups is true if members of groups are granted like any other pod.
	WithoutGroups bool
	// Off is true if an extender runs in a pod, without fair sharing, and Unknown if none runs in a pod.
	Off, Unknown bool
}

// extenderContainer is the name of the extender's container. Other products have pods of these components too.
const extenderContainer = "extender"

// readShareSettings reads the settings from the arguments of the extender's newest pod that runs. Without one, or if it has no such arguments,
// they are the extender's defaults.
func readShareSettings(ctx context.Context, client kubernetes.Interface) (ShareSettings, error) {
	var newest *corev1.Pod
	var args []string
	options := metav1.ListOptions{LabelSelector: "app.kubernetes.io/component in (extender, scheduler)", FieldSelector: "status.phase=Running"}
	err := each(ctx, "the extender's pods", client.CoreV1().Pods(metav1.NamespaceAll).List, options, func(pod *corev1.Pod) {
		i := slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == extenderContainer })
		running := func(c corev1.ContainerStatus) bool { return c.Name == extenderContainer && c.State.Running != nil }
		runs := slices.ContainsFunc(pod.Status.ContainerStatuses, running)
		if i >= 0 && runs && (newest == nil || newest.CreationTimestamp.Before(&pod.CreationTimestamp)) {
			newest, args = pod, pod.Spec.Containers[i].Args
		}
	})
	settings := ShareSettings{PriorityCutoff: dispatch.DefaultPriorityCutoff}
	if newest == nil || err != nil {
		settings.Unknown = true
		return settings, err
	}
	flags := pflag.NewFlagSet(extenderContainer, pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	mode := flags.String("fair-share", shareOff, "")
	hold := flags.Duration("gang-hold", 1, "") // Only 0 matters.
	by := flags.String("fair-share-by", dispatch.ByNamespace, "")
	flags.Int32Var(&settings.PriorityCutoff, "fair-share-priority-cutoff", settings.PriorityCutoff, "")
	if err := flags.Parse(args); err != nil {
		return settings, fmt.Errorf("arguments of the extender's pod %s/%s: %w", newest.Namespace, newest.Name, err)
	}
	settings.Off, settings.WithoutGroups = *mode == shareOff, *hold == 0
	settings.Label, err = dispatch.TenantLabel(*by)
	return settings, err
}

// shareOff is the value of --fair-share without fair sharing, and its default.
const shareOff = "off"

// BuildShares returns the tenants.
func BuildShares(objects Objects, namespaces []*corev1.Namespace, settings ShareSettings, now time.Time) Shares {
	known := map[string]dispatch.Namespace{}
	out := Shares{APIVersion: ReportAPIVersion, Kind: SharesKind, Tenants: []Tenant{}, Problems: []string{}}
	for _, object := range namespaces {
		ns, problem := dispatch.ParseNamespace(object.Name, object.Labels, object.Annotations, settings.Label)
		known[object.Name] = ns
		if problem != "" {
			out.Problems = append(out.Problems, fmt.Sprintf("namespace %s: %s: the default value is used", object.Name, problem))
		}
	}
	slices.Sort(out.Problems)
	hasLabel := func(object *corev1.Namespace) bool { return metav1.HasLabel(object.ObjectMeta, settings.Label) }
	if settings.Label != "" && !slices.ContainsFunc(namespaces, hasLabel) {
		out.Problems = append(out.Problems, fmt.Sprintf("no namespace has the label %s of --fair-share-by, so all are one tenant", settings.Label))
	}
	ledger := diagnosis.NewLedger(objects.Nodes, objects.Pods)
	nodes, problem := usableNodes(objects.Nodes)
	if problem != "" {
		out.Problems = append(out.Problems, problem)
	}
	pods := make([]dispatch.Pod, 0, len(objects.Pods))
	pending := map[gpu.PodUID]*diagnosis.Pod{}
	var members []gang.Member
	for _, object := range objects.Pods {
		info := clustercache.NewPodInfo(object)
		nodes.SetPod(&info.PodUse)
		pod := dispatch.Pod{
			Pod: info.Pod, Created: object.CreationTimestamp.Time, Node: info.Node, Ended: info.Ended, Gated: info.Gated, Constraints: info.Constraints,
			GatedOtherwise: info.GatedOtherwise, Invalid: info.RequestError != "",
		}
		if protocol.InGroup(object) && !settings.WithoutGroups {
			pod.Group, members = info.Member.Gang, append(members, *info.Member)
		}
		if info.Pending != nil {
			ungated := *object
			// What else keeps it pending? That no scheduler has tried it says nothing.
			ungated.Spec.SchedulingGates, ungated.CreationTimestamp = nil, metav1.Time{}
			pending[pod.UID] = diagnosis.NewPod(&ungated)
			pod.RoomKey = unique.Make(fmt.Sprint(pod.Demand(), " ", pod.Constraints.Value()))
		}
		pods = append(pods, pod)
	}
	diagnoser := diagnosis.FromObjects(objects.Nodes, objects.Pods, now)
	options := dispatch.Options{
		Ledger: ledger, Groups: gang.NewSnapshot(members, nil, now), TurnRules: dispatch.NewTurnRules(settings.PriorityCutoff),
		Nodes: nodes,
	}
	for _, memory := range ledger.NodeMemory() {
		out.Total = out.Total.Add(memory)
	}
	for _, t := range dispatch.Snapshot(options, known, pods) {
		tenant := Tenant{Tenant: t}
		if tenant.Guaranteed > out.Total && out.Total > 0 {
			out.Problems = append(out.Problems, fmt.Sprintf("tenant %s: its guaranteed amount of %d units is more than the cluster's %d: write it in units of aliyun.com/gpu-mem",
				reasons.TenantName(t.Name), t.Guaranteed, out.Total))
		}
		switch next := pending[t.Next.UID]; {
		case next == nil:
		case t.Obstacle == reasons.ObstacleNeverFits: // Of a group, each member may fit alone.
			tenant.Cause = t.Obstacle.String()
		default:
			tenant.Cause = diagnoser.Diagnose(next, nil).Reason.Words()
		}
		out.Tenants = append(out.Tenants, tenant)
	}
	return out
}

// usableNodes returns the nodes that share their cards, and the problem that they have different units; empty if they don't.
func usableNodes(objects []*corev1.Node) (*eligibility.Cluster, string) {
	nodes, units := eligibility.NewCluster(), map[gpu.Unit][]string{}
	for _, object := range objects {
		parsed := protocol.ParseNode(object)
		if spec, shares := eligibility.Spec(object, parsed); shares {
			nodes.SetNode(object, &spec)
		}
		if unit := gpu.UnitOf(parsed.Unit, parsed.Cards); len(parsed.Cards) > 0 {
			units[unit] = append(units[unit], object.Name)
		}
	}
	return nodes, diagnosis.UnitsProblem(units)
}

func (o *options) drawShares(shares Shares) (page, error) {
	table := rows{{bold, []string{"TENANT", "WEIGHT", "GUARANTEED", "SHARE", "ALLOCATED", "WAITING", "PODS WAITING", "NEXT POD"}}}
	for _, t := range shares.Tenants {
		table.add(plain, reasons.TenantName(t.Name), fmt.Sprint(t.Weight), t.Guaranteed.String(), t.Share.String(), t.Allocated.String(),
			t.WaitingMemory.String(), fmt.Sprint(t.Waiting), cmp.Or(t.Cause, "-"))
	}
	page, err := o.pageOf(shares, func(out *bytes.Buffer) { table.writeAlone(out, o.format()) })
	if o.structured() {
		return page, err
	}
	for _, problem := range shares.Problems {
		page.remarks += problem + "\n"
	}
	if len(shares.Tenants) == 0 {
		page.remarks += "No tenant has or asks for GPU memory.\n"
	}
	return page, err
}
