package rueidis_test

import (
	"testing"

	"github.com/fencelock/fencelock/internal/redisbackend"
)

// What is tested of all drivers for Redis; the tests are described where they are.

func TestPush(t *testing.T)                     { redisbackend.Rueidis.TestPush(t) }
func TestSubscriptionComesBack(t *testing.T)    { redisbackend.Rueidis.TestSubscriptionComesBack(t) }
func TestSubscriptionGoesDead(t *testing.T)     { redisbackend.Rueidis.TestSubscriptionGoesDead(t) }
func TestSubscriptionEnds(t *testing.T)         { redisbackend.Rueidis.TestSubscriptionEnds(t) }
func TestOneSubscription(t *testing.T)          { redisbackend.Rueidis.TestOneSubscription(t) }
func TestCloseLeavesNothing(t *testing.T)       { redisbackend.Rueidis.TestCloseLeavesNothing(t) }
func TestPolicyWarning(t *testing.T)            { redisbackend.Rueidis.TestPolicyWarning(t) }
func TestScriptsForgotten(t *testing.T)         { redisbackend.Rueidis.TestScriptsForgotten(t) }
func TestOneRequestPerStep(t *testing.T)        { redisbackend.Rueidis.TestOneRequestPerStep(t) }
func TestOutOfMemory(t *testing.T)              { redisbackend.Rueidis.TestOutOfMemory(t) }
func TestForeignType(t *testing.T)              { redisbackend.Rueidis.TestForeignType(t) }
func TestEvictedParts(t *testing.T)             { redisbackend.Rueidis.TestEvictedParts(t) }
func TestNoOvertaking(t *testing.T)             { redisbackend.Rueidis.TestNoOvertaking(t) }
func TestRefusals(t *testing.T)                 { redisbackend.Rueidis.TestRefusals(t) }
func TestHalfAStep(t *testing.T)                { redisbackend.Rueidis.TestHalfAStep(t) }
func TestUnknownOutcome(t *testing.T)           { redisbackend.Rueidis.TestUnknownOutcome(t) }
func TestNeverSent(t *testing.T)                { redisbackend.Rueidis.TestNeverSent(t) }
func TestOddNames(t *testing.T)                 { redisbackend.Rueidis.TestOddNames(t) }
func TestBigBatch(t *testing.T)                 { redisbackend.Rueidis.TestBigBatch(t) }
func TestBatchItemsAreIndependent(t *testing.T) { redisbackend.Rueidis.TestBatchItemsAreIndependent(t) }
func TestList(t *testing.T)                     { redisbackend.Rueidis.TestList(t) }
func TestOpenIsBounded(t *testing.T)            { redisbackend.Rueidis.TestOpenIsBounded(t) }
func TestLeastRights(t *testing.T) {
	redisbackend.Rueidis.TestLeastRights(t, "+role", "+cluster|shards")
}
func TestCluster(t *testing.T)             { redisbackend.Rueidis.TestCluster(t) }
func TestSlotMigration(t *testing.T)       { redisbackend.Rueidis.TestSlotMigration(t) }
func TestTLS(t *testing.T)                 { redisbackend.Rueidis.TestTLS(t, false) }
func TestWaitReplicas(t *testing.T)        { redisbackend.Rueidis.TestWaitReplicas(t) }
func TestClusterWaitReplicas(t *testing.T) { redisbackend.Rueidis.TestClusterWaitReplicas(t) }
func TestSentinelTLS(t *testing.T)         { redisbackend.Rueidis.TestSentinelTLS(t) }

func TestWrite(t *testing.T)                 { redisbackend.Rueidis.TestWrite(t) }
func TestWriteWhoseReplyIsLost(t *testing.T) { redisbackend.Rueidis.TestWriteWhoseReplyIsLost(t) }
func TestWriteInTheSlot(t *testing.T)        { redisbackend.Rueidis.TestWriteInTheSlot(t) }

func TestMigrationUnderLoad(t *testing.T)  { redisbackend.Rueidis.TestMigrationUnderLoad(t) }
func TestClusterDown(t *testing.T)         { redisbackend.Rueidis.TestClusterDown(t) }
func TestClusterLostReply(t *testing.T)    { redisbackend.Rueidis.TestClusterLostReply(t, false) }
func TestFailoverLosesWrites(t *testing.T) { redisbackend.Rueidis.TestFailoverLosesWrites(t) }
func TestFailoverKeepsLocks(t *testing.T)  { redisbackend.Rueidis.TestFailoverKeepsLocks(t) }
